"""Every mask, by name: `from longmesh.attention import masks; masks.documents([5, 3]) & masks.full()`.

>>> print(masks.documents([5, 3]) & masks.sliding_window(2))
(documents(2 of 3..5 tokens, within=causal()) & sliding_window(2, 0))
"""

from longmesh.attention.mask.band import causal, full, sliding_window
from longmesh.attention.mask.base import Mask
from longmesh.attention.mask.document import chunked, documents, from_cu_seqlens
from longmesh.attention.mask.mask_mod import from_block_mask, mask_mod
from longmesh.attention.mask.prefix import prefix_lm
from longmesh.attention.mask.slices import make_slices

__all__ = [
    "Mask",
    "causal",
    "chunked",
    "documents",
    "from_block_mask",
    "from_cu_seqlens",
    "full",
    "make_slices",
    "mask_mod",
    "prefix_lm",
    "sliding_window",
]
