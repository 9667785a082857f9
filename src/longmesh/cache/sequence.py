"""A cached sequence: its length, its ranks, and which pages hold it on each rank. Bookkeeping, no tensors."""

from __future__ import annotations

from collections.abc import Sequence as Listed
from dataclasses import dataclass, field

import numpy as np

from longmesh.cache.placement import PagePlacement, Span, without

GONE = -1  # a page that was given back, since no query sees it any more
_NOWHERE = 1 << 40  # the slot of a rank that a sequence does not lie on


@dataclass(eq=False)
class Sequence:
    """Made by a `PagePool` and changed by it alone. `tables[slot]` are the pages on ``placement.ranks[slot]``.

    `hidden`: spans of positions that no query sees, such as padding. `width`: over how many ranks it was asked to lie
    (None: all). `by_cost`: the pool chose the width, and may choose a larger one later. What every step needs is kept:
    `slots`, the slot of each rank of the pool; `own_to`, up to where the last page is known to be this sequence's
    alone; `last`, the rank and number of that page. `first_page`: those before it were given back (`GONE`).

    >>> from longmesh.cache import PagePool
    >>> pool = PagePool(mesh, num_pages=4, page=2, layers=1, kv_heads=1, head_dim=8)
    >>> sequence = pool.sequence()
    >>> pool.step([(sequence, 7)]).commit()
    >>> len(sequence), sequence.placement.ranks, [len(pages) for pages in sequence.tables]
    (7, (0, 1), [2, 2])
    """

    placement: PagePlacement
    tables: list[list[int]]
    length: int = 0
    hidden: tuple[Span, ...] = ()
    is_free: bool = False
    name: int = 0
    width: int | None = None
    by_cost: bool = False
    first_page: int = 0
    own_to: int = 0
    last: tuple[int, int] = (-1, -1)
    slots: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64), repr=False)
    _runs: dict[int, list[tuple[int, int]]] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return self.length

    def lie(self, placement: PagePlacement, tables: list[list[int]], num_ranks: int) -> None:
        """Lie on these pages from now on."""
        self.placement, self.tables = placement, tables
        self.slots = np.full(num_ranks, _NOWHERE, dtype=np.int64)
        self.slots[list(placement.ranks)] = np.arange(placement.width)
        self.changed()

    def visible(self, start: int, stop: int) -> list[Span]:
        """The positions from `start` up to `stop` that are not hidden, as spans."""
        return without((start, stop), self.hidden) if self.hidden else [(start, stop)] * (start < stop)

    def changed(self) -> None:
        """Some table was changed, or shared: whose the last page is must be asked again."""
        self.own_to = -1
        self._runs.clear()

    def runs(self, slot: int) -> list[tuple[int, int]]:
        """A slot's table as (first page, how many) of pages in a row."""
        found = self._runs.get(slot)
        if found is None:
            table, gone = self.tables[slot], self.num_gone(self.placement, slot)
            found = self._runs[slot] = [(GONE, gone)] * (gone > 0) + in_a_row(table[gone:])
        return found

    def num_gone(self, placement: PagePlacement, slot: int) -> int:
        """The pages on a slot that were given back, if the sequence lies so."""
        return placement.num_pages(slot, self.first_page * placement.page)

    def empty_tables(self, placement: PagePlacement) -> list[list[int]]:
        """Tables of a placement, with nothing but the pages that were given back."""
        return [[GONE] * self.num_gone(placement, slot) for slot in range(placement.width)]


def in_a_row(pages: Listed[int]) -> list[tuple[int, int]]:
    """Pages that follow each other, as (first, how many).

    >>> in_a_row([4, 5, 6, 2, 3])
    [(4, 3), (2, 2)]
    """
    runs: list[tuple[int, int]] = []
    for page in pages:
        if runs and runs[-1][0] + runs[-1][1] == page:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page, 1))
    return runs
