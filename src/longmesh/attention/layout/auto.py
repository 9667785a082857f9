"""Auto: the layout that the cost model finds fastest for this mask and these ranks.

It stands for a choice that planning makes; it cuts nothing by itself.
"""

import dataclasses

from longmesh.attention.layout.base import Ownership, TokenLayout, Workload


@dataclasses.dataclass(frozen=True)
class Auto(TokenLayout):
    """The layout that the cost model finds fastest; planning puts it in place of this.

    >>> print(plan_attention(seq_len=4096, ranks=4, mask=masks.sliding_window(64), layout=Auto()).layout)
    Contiguous
    """

    follows_mask = True

    def assign(self, work: Workload, ranks: int) -> Ownership:
        raise AssertionError("planning replaces Auto by the layout it chose")
