"""Exact attention over a sequence that is cut over ranks. Plain tensors in, plain tensors out.

plan = plan_attention(seq_len=8192, ranks=4, mask=masks.documents([5000, 3192]))
print(plan.explain())
"""

from longmesh.attention import masks
from longmesh.attention.engine.context_parallel import ContextParallel
from longmesh.attention.exchange.allgather import AllGather
from longmesh.attention.exchange.base import Exchange
from longmesh.attention.exchange.cheapest import Cheapest
from longmesh.attention.exchange.hybrid import Hybrid
from longmesh.attention.exchange.named import AutoExchange
from longmesh.attention.exchange.ring import Ring
from longmesh.attention.exchange.sparse import Sparse
from longmesh.attention.exchange.staged import StagedExchange
from longmesh.attention.exchange.ulysses import HeadPart, HeadShare, Ulysses
from longmesh.attention.layout.base import Ownership, TokenLayout, Workload
from longmesh.attention.layout.contiguous import Contiguous
from longmesh.attention.layout.named import Auto
from longmesh.attention.layout.ordered import Ordered
from longmesh.attention.layout.per_document import PerDocument
from longmesh.attention.layout.round_robin import RoundRobin
from longmesh.attention.layout.solve import Solve
from longmesh.attention.layout.striped import Striped
from longmesh.attention.layout.zigzag import Zigzag
from longmesh.attention.mask.block import UNBOUNDED, Block
from longmesh.attention.plan.api import plan_attention
from longmesh.attention.plan.attention_plan import AttentionPlan, RankPlan, RowPlan, Rows, Stage
from longmesh.attention.plan.stats import RankStats
from longmesh.attention.scope.cut_block_mask import create_block_mask_cached, rewrite_mask_mod
from longmesh.attention.scope.flex import create_cp_block_mask, flex_attention
from longmesh.attention.tokens.loss import cut_cross_entropy
from longmesh.attention.tokens.packing import PackedDocuments, collate_rows, pack_documents
from longmesh.renamed import renamed

__all__ = [
    "UNBOUNDED",
    "AllGather",
    "AttentionPlan",
    "Auto",
    "AutoExchange",
    "Block",
    "Cheapest",
    "ContextParallel",
    "Contiguous",
    "Exchange",
    "HeadPart",
    "HeadShare",
    "Hybrid",
    "Ordered",
    "Ownership",
    "PackedDocuments",
    "PerDocument",
    "RankPlan",
    "RankStats",
    "Ring",
    "RoundRobin",
    "RowPlan",
    "Rows",
    "Solve",
    "Sparse",
    "Stage",
    "StagedExchange",
    "Striped",
    "TokenLayout",
    "Ulysses",
    "Workload",
    "Zigzag",
    "collate_rows",
    "create_block_mask_cached",
    "create_cp_block_mask",
    "cut_cross_entropy",
    "flex_attention",
    "masks",
    "pack_documents",
    "plan_attention",
    "rewrite_mask_mod",
]

__getattr__ = renamed(__name__, {"Layout": "TokenLayout"})
