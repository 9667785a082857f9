"""Sequences on their way to another placement, a few pages at a time. Pure, and the same on every rank.

    placement (0,)  ->  (2,)          pages of rank 0   7 8 9 10          10 is the last page, not full yet
    staged so far                     copies on rank 2  3 4 .  .
    all staged: the sequences change over to the copies at once, and pages 7 to 10 of rank 0 are free

Until then the old pages are read and written as before: steps, forks and crops need not know. A copy is good as long
as its page is neither freed nor written; then it is dropped, and made again later.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from longmesh.cache.placement import PagePlacement
from longmesh.cache.sequence import Sequence

if TYPE_CHECKING:
    from longmesh.cache.bookkeeping import Book

Place = tuple[int, int]  # a rank and a page of it
Moved = dict[
    Place, tuple[PagePlacement, int, int]
]  # where pages were -> their sequences' placement, rank and page now


class PageTransfer(NamedTuple):
    """What a page of a rank holds goes to a page of another rank."""

    source: int
    page: int
    target: int
    target_page: int


def places_of(sequence: Sequence) -> Iterable[tuple[int, Place]]:
    """The pages that a sequence holds by number, each with where it is."""
    placement, tables = sequence.placement, sequence.tables
    for number in range(sequence.first_page, -(-sequence.length // placement.page)):
        index, slot = divmod(number, placement.width)
        yield number, (placement.ranks[slot], tables[slot][index])


def families(sequences: Iterable[Sequence]) -> list[list[Sequence]]:
    """Sequences that share pages, directly or by others between them, together; they have one placement."""
    found: dict[int, list[Sequence]] = {}  # by the name of the first
    home: dict[Place, int] = {}
    for sequence in sequences:
        near: set[int] = set()
        for _, place in places_of(sequence):
            if place in home:
                near.add(home[place])
            home[place] = sequence.name
        joined = [sequence]
        for name in sorted(found) if near else ():
            if not near.isdisjoint(member.name for member in found[name]):
                joined = found.pop(name) + joined
        found[joined[0].name] = joined
    return [found[name] for name in sorted(found)]


class Moving:
    """The move of a family to `placement`, as far as it has come."""

    def __init__(self, book: Book, family: list[Sequence], placement: PagePlacement) -> None:
        self._book, self.placement = book, placement
        self._names = {sequence.name for sequence in family}
        self.staged: dict[Place, Place] = {}
        for sequence in book.live.values():
            sequence.own_to = -1  # so that the book sees every write

    def stage(self, sent: list[int], received: list[int]) -> tuple[list[PageTransfer], bool]:
        """The copies to make next, and whether all are made then. It is cancelled if a rank has no page left for them.

        `sent`, `received`: how many pages each rank may still send and receive; counted down.
        """
        found: list[PageTransfer] = []
        is_whole = True
        last: dict[int, int] = {}
        for source, target in self._wanted().items():
            if source in self.staged:
                last[target] = self.staged[source][1]
            elif source[0] != target:
                ledger = self._book.ledgers[target]
                if not (sent[source[0]] and received[target]):
                    is_whole = False
                    continue
                if not ledger.num_free:
                    self.cancel()
                    return [], False
                page = last[target] = ledger.take(last.get(target))
                self.staged[source] = (target, page)
                sent[source[0]] -= 1
                received[target] -= 1
                found.append(PageTransfer(*source, target, page))
        return found, is_whole

    def finish(self) -> None:
        """Change over to the copies; every page has one."""
        book, placement = self._book, self.placement
        book.moving = None
        moved: Moved = {}
        old: list[Place] = []
        for sequence in self._family():
            before = list(places_of(sequence))
            old += [place for _, place in before]
            tables = sequence.empty_tables(placement)
            for number, place in before:
                rank, page = self.staged.get(place, place)
                tables[number % placement.width].append(page)
                if place in moved or (rank, page) == place:
                    book.ledgers[rank].share(page)
                moved[place] = (placement, rank, page)
            sequence.lie(placement, tables, book.num_ranks)
        book.tell_moved(moved)
        for rank, page in old:
            book.drop(rank, [page])

    def forget(self, rank: int, page: int) -> None:
        """The page was freed or is about to be written: its copy is of no use."""
        target = self.staged.pop((rank, page), None)
        if target is not None:
            self._book.ledgers[target[0]].drop(target[1])

    def cancel(self) -> None:
        """Give all copies back; the sequences stay where they are."""
        self._book.moving = None
        for rank, page in list(self.staged):
            self.forget(rank, page)

    def _family(self) -> list[Sequence]:
        """Those that were meant, and those that share pages with them by now."""
        staged = self.staged.keys()
        found: list[Sequence] = []
        for family in families(self._book.live.values()):
            if any(
                sequence.name in self._names
                or not staged.isdisjoint(place for _, place in places_of(sequence))
                for sequence in family
            ):
                found += family
        return found

    def _wanted(self) -> dict[Place, int]:
        """Each page's rank to be, by rising page numbers."""
        ranks, width = self.placement.ranks, self.placement.width
        numbers = {place: number for sequence in self._family() for number, place in places_of(sequence)}
        return {
            place: ranks[numbers[place] % width] for place in sorted(numbers, key=lambda p: (numbers[p], p))
        }
