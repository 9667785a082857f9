"""Striped: token t belongs to rank t % n. |0123|0123|0123|0123|

Balances any mask that changes slowly along the sequence, causal above all, and every rank needs
every other's keys. A band stays a band between two stripes, so the blocks stay few.
"""

import dataclasses

from longmesh.attention.layout.base import Ownership, TokenLayout, Workload, collect


@dataclasses.dataclass(frozen=True)
class Striped(TokenLayout):
    """Token t belongs to rank t % n.

    >>> plan_attention(seq_len=7, ranks=2, layout=Striped(), exchange="ring").rows[0].positions(1)
    array([1, 3, 5])
    """

    def assign(self, work: Workload, ranks: int) -> Ownership:
        owned: list[tuple[int, int, int]] = []
        at = 0
        for r in range(ranks):
            count = max(0, -(-(work.seq_len - r) // ranks))
            owned.append((at, at + count, r))
            at += count
        return collect(work.seq_len, ranks, owned, stride=ranks)
