"""Ordered: tokens in order, one stretch for each rank, and attention balanced all the same.

    tokens   |0000|1111|2222|3333|       recurrent layers and convolutions need each rank's tokens in one stretch
    area     |▂▂▂▂|▄▄▄▄|▆▆▆▆|████|       a causal mask leaves the first rank idle and the last one busy, so blocks
    moved    |▄▄▄▄|▄▄▄▄|▄▄▄▄|▄▄▄▄|       of the busy ranks' queries are computed by idle ones

Others permute tokens before and after every recurrent layer; here they stay.
"""

import dataclasses

from longmesh.attention.layout.base import Ownership, TokenLayout, Workload
from longmesh.attention.layout.contiguous import Contiguous
from longmesh.attention.layout.rebalance import rebalance


@dataclasses.dataclass(frozen=True)
class Ordered(TokenLayout):
    """One stretch of the sequence for each rank; some blocks are computed away from home.

    >>> plan = plan_attention(seq_len=4096, ranks=4, layout=Ordered())
    >>> plan.rows[0].ownership.pieces
    (((0, 1024),), ((1024, 2048),), ((2048, 3072),), ((3072, 4096),))
    >>> areas = [stats.area for stats in plan.stats()]
    >>> round(max(areas) * 4 / sum(areas), 2)
    1.0
    """

    follows_mask = True

    def assign(self, work: Workload, ranks: int) -> Ownership:
        return rebalance(work.slices, Contiguous().assign(work, ranks), work.query_cost, work.keys)
