"""All-gather: every shard to every rank in one stage, while the rank's own shard is computed.

The fewest messages, and the whole sequence in memory. If the mask needs nothing from elsewhere, nothing
is sent.
"""

import dataclasses

import numpy as np

from longmesh.attention.exchange.base import Exchange
from longmesh.attention.exchange.fragment import AT, OWNER, RANK, STAGE, START, STOP
from longmesh.attention.layout.base import Ownership


def shards_from(rank: np.ndarray, piece: np.ndarray, owned: Ownership) -> np.ndarray:
    """Fragments for whole rows `piece` of the ownership's table at `rank`."""
    table = owned.table
    out = np.zeros((len(rank), 7), dtype=np.int64)
    out[:, RANK], out[:, OWNER], out[:, AT] = rank, table[piece, 2], table[piece, 0]
    out[:, START] = table[piece, 3]
    out[:, STOP] = table[piece, 3] + table[piece, 1] - table[piece, 0]
    return out


@dataclasses.dataclass(frozen=True)
class AllGather(Exchange):
    """Every shard to every rank, in one stage.

    >>> plan = plan_attention(seq_len=4096, ranks=4, layout="zigzag", exchange=AllGather())
    >>> [stage.kv_rows for stage in plan.rows[0].rank(0).stages]
    [1024, 3072]
    """

    def stages(self, remote: np.ndarray, owned: Ownership) -> np.ndarray:
        if len(remote) == 0:
            return remote
        rank, piece = np.divmod(np.arange(owned.num_ranks * len(owned.table)), len(owned.table))
        out = shards_from(rank, piece, owned)
        out = out[out[:, RANK] != out[:, OWNER]]
        out[:, STAGE] = 1
        return out
