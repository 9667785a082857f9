"""Ring: shards go round; in stage s rank r holds what rank r - s owns, received from rank r - 1.

    stage   rank 0   rank 1   rank 2        three shards in memory whatever the number of ranks: its own,
      0       0        1        2           the one it computes on, the one that arrives.
      1       2        0        1
      2       1        2        0

A shard shrinks on its way to the stretch that the ranks still before it need, and stops where
nobody does; so a window sends only edges.
"""

import dataclasses

import numpy as np

from longmesh.attention.exchange.allgather import shards_from
from longmesh.attention.exchange.base import Exchange
from longmesh.attention.exchange.fragment import AT, OWNER, RANK, STAGE, START, STOP
from longmesh.attention.layout.base import Ownership


def stretches(remote: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """`first[s, o]`, `last[s, o]`: the rows of o's shard that are still wanted s hops from home or later."""
    first = np.full((n + 1, n), np.iinfo(np.int64).max)
    last = np.zeros((n + 1, n), dtype=np.int64)
    hop = (remote[:, RANK] - remote[:, OWNER]) % n
    np.minimum.at(first, (hop, remote[:, OWNER]), remote[:, START])
    np.maximum.at(last, (hop, remote[:, OWNER]), remote[:, STOP])
    first = np.minimum.accumulate(first[::-1])[::-1]
    last = np.maximum.accumulate(last[::-1])[::-1]
    return first, last


@dataclasses.dataclass(frozen=True)
class Ring(Exchange):
    """Shards go from rank to rank, each as far as somebody still needs it.

    >>> plan = plan_attention(seq_len=4096, ranks=4, layout="zigzag", exchange=Ring())
    >>> [stage.kv_rows for stage in plan.rows[0].rank(3).stages]
    [1024, 1024, 1024, 512]
    """

    relays = True

    def stages(self, remote: np.ndarray, owned: Ownership) -> np.ndarray:
        n = owned.num_ranks
        first, last = stretches(remote, n)
        hop, piece = np.divmod(np.arange(n * len(owned.table)), len(owned.table))
        owner = owned.table[piece, 2]
        out = shards_from((owner + hop) % n, piece, owned)
        out[:, STAGE] = hop
        start = np.maximum(out[:, START], first[hop, owner])
        stop = np.minimum(out[:, STOP], last[hop, owner])
        out[:, AT] += start - out[:, START]
        out[:, START], out[:, STOP] = start, stop
        return out[(hop > 0) & (start < stop)]
