"""Contiguous: rank r owns the r-th part. |0000|1111|2222|3333|

The least traffic for local masks (windows, short documents); a causal mask leaves the first
rank nearly idle.
"""

import dataclasses

from longmesh.attention.layout.base import Ownership, TokenLayout, Workload, collect, even_bounds


@dataclasses.dataclass(frozen=True)
class Contiguous(TokenLayout):
    """One stretch of the sequence for each rank.

    >>> plan_attention(seq_len=10, ranks=3, layout=Contiguous(), exchange="ring").rows[0].ownership.pieces
    (((0, 4),), ((4, 7),), ((7, 10),))
    """

    def assign(self, work: Workload, ranks: int) -> Ownership:
        bounds = even_bounds(work.seq_len, ranks)
        return collect(work.seq_len, ranks, [(bounds[r], bounds[r + 1], r) for r in range(ranks)])
