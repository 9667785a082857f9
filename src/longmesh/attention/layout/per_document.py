"""Per document: every document is cut head-tail over all ranks. |0|1|1|0| |0|1|1|0| ...

Balances each causal document by itself, so area is even whatever the mix; every document of more
tokens than ranks travels. What a document is comes from the mask: a stretch of tokens that no
slice connects with the rest. The rank that begins turns, so that remainders even out.
"""

import dataclasses

from longmesh.attention.layout.base import Ownership, TokenLayout, Workload, collect
from longmesh.attention.layout.components import components
from longmesh.attention.layout.zigzag import zigzag_parts


@dataclasses.dataclass(frozen=True)
class PerDocument(TokenLayout):
    """Every document cut head-tail over all ranks.

    >>> mask = masks.documents([8, 4])
    >>> plan = plan_attention(seq_len=12, ranks=2, mask=mask, layout=PerDocument(), exchange="sparse")
    >>> plan.rows[0].ownership.pieces
    (((0, 2), (6, 9), (11, 12)), ((2, 6), (9, 11)))
    """

    follows_mask = True

    def assign(self, work: Workload, ranks: int) -> Ownership:
        owned: list[tuple[int, int, int]] = []
        first = 0
        for start, stop in components(work.slices, work.seq_len, work.one_sequence).tolist():
            owned += zigzag_parts(start, stop, ranks, first)
            first = (first + stop - start) % ranks
        return collect(work.seq_len, ranks, owned)
