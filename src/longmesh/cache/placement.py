"""Where a sequence's tokens are: a function of their positions alone, the same on every rank. Pure.

    page 2, ranks (0, 1, 2)      token  0 1 | 2 3 | 4 5 | 6 7 | 8
                                 rank   0 0   1 1   2 2   0 0   1

Pages are dealt out in turn, so that a growing sequence stays balanced and two sequences with the same beginning lie
alike. Each rank's tokens, in order, are its *local* tokens: token 6 is local token 2 of rank 0.

Pitfall: after k tokens are taken back, ``local(length - k)`` is not ``local(length) - k``: ask again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Span = tuple[int, int]  # from, to


class PagePlacement(NamedTuple):
    """Token p is on ``ranks[p // page % len(ranks)]``. A rank's *slot* is its index in `ranks`.

    >>> PagePlacement((0, 1, 2), page=2).owner(7)
    0
    >>> [PagePlacement((0, 1, 2), page=2).local(slot, 9) for slot in range(3)]
    [4, 3, 2]
    """

    ranks: tuple[int, ...]
    page: int

    @property
    def width(self) -> int:
        """Over how many ranks it is."""
        return len(self.ranks)

    def owner(self, position: int) -> int:
        """The rank that holds a token."""
        return self.ranks[position // self.page % len(self.ranks)]

    def local(self, slot: int, length: int) -> int:
        """How many of the first `length` tokens are on a slot."""
        around, rest = divmod(length, len(self.ranks) * self.page)
        return around * self.page + min(max(rest - slot * self.page, 0), self.page)

    def position(self, slot: int, index: int) -> int:
        """Of a slot's local token `index`."""
        number, offset = divmod(index, self.page)
        return (number * len(self.ranks) + slot) * self.page + offset

    def num_pages(self, slot: int, length: int) -> int:
        """The pages on a slot that the first `length` tokens take."""
        return -(-self.local(slot, length) // self.page)

    def local_spans(self, slot: int, spans: Sequence[Span]) -> list[Span]:
        """The local tokens of spans of positions, where there are any."""
        found = [(self.local(slot, start), self.local(slot, stop)) for start, stop in spans]
        return [(start, stop) for start, stop in found if start < stop]


def without(span: Span, hidden: Sequence[Span]) -> list[Span]:
    """What is left of a span; `hidden` spans are in order and apart from each other.

    >>> without((2, 10), [(0, 3), (5, 6)])
    [(3, 5), (6, 10)]
    """
    start, stop = span
    left: list[Span] = []
    for low, high in hidden:
        if start < min(low, stop):
            left.append((start, min(low, stop)))
        start = max(start, high)
    if start < stop:
        left.append((start, stop))
    return left
