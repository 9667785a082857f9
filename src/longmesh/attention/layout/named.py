"""The layouts by their short names: one table, and the lookup that explains itself."""

import dataclasses

from longmesh.attention.layout.base import Ownership, TokenLayout, Workload
from longmesh.attention.layout.contiguous import Contiguous
from longmesh.attention.layout.ordered import Ordered
from longmesh.attention.layout.per_document import PerDocument
from longmesh.attention.layout.round_robin import RoundRobin
from longmesh.attention.layout.solve import Solve
from longmesh.attention.layout.striped import Striped
from longmesh.attention.layout.zigzag import Zigzag
from longmesh.errors import LongmeshError


@dataclasses.dataclass(frozen=True)
class Auto(TokenLayout):
    """The layout that the cost model finds fastest; planning puts it in place of this.

    >>> print(plan_attention(seq_len=4096, ranks=4, mask=masks.sliding_window(64), layout=Auto()).layout)
    Contiguous
    """

    follows_mask = True

    def assign(self, work: Workload, ranks: int) -> Ownership:
        raise AssertionError("planning replaces Auto by the layout it chose")


LAYOUTS: dict[str, TokenLayout] = {
    "contiguous": Contiguous(),
    "ordered": Ordered(),
    "zigzag": Zigzag(),
    "striped": Striped(),
    "per_document": PerDocument(),
    "round_robin": RoundRobin(),
    "solve": Solve(),
    "auto": Auto(),
}


def layout_of(choice: TokenLayout | str) -> TokenLayout:
    """The layout, or the one of that name."""
    if isinstance(choice, TokenLayout):
        return choice
    if choice not in LAYOUTS:
        raise LongmeshError(
            f"layout={choice!r} is not known; use one of {', '.join(LAYOUTS)}, "
            "or a value such as layout=Zigzag() or a TokenLayout of your own"
        )
    return LAYOUTS[choice]
