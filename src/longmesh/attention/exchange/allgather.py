"""All-gather: every shard to every rank in one stage, while the rank's own shard is computed.

The fewest messages, and the whole sequence in memory. If the mask needs nothing from elsewhere, nothing
is sent.
"""

import dataclasses

import numpy as np

from longmesh.attention.exchange.base import Exchange
from longmesh.attention.exchange.needs import Needs, Stretches
from longmesh.attention.exchange.sparse import Sparse

_AT_ONCE = Sparse(stages_at_most=1)


@dataclasses.dataclass(frozen=True)
class AllGather(Exchange):
    """Every shard to every rank, in one stage.

    >>> plan = plan_attention(seq_len=4096, ranks=4, layout="zigzag", exchange=AllGather())
    >>> [stage.kv_rows for stage in plan.rows[0].rank(0).stages]
    [1024, 3072]
    """

    def last_stage(self, needs: Needs) -> int:
        return _AT_ONCE.last_stage(needs.everything)

    def stretches(self, needs: Needs) -> Stretches:
        return _AT_ONCE.stretches(needs.everything)

    def received(self, needs: Needs, rank: int) -> np.ndarray:
        return _AT_ONCE.received(needs.everything, rank)

    def lent(self, needs: Needs, owner: int) -> np.ndarray:
        return _AT_ONCE.lent(needs.everything, owner)
