"""The books of a pool: which pages of which rank hold which sequence. Pure, and the same on every rank.

Sequences that share a beginning share its pages. A page that is shared and about to be written is copied first, on
its own rank: `extend` says which. Nothing is changed by a call that raises.

Every rank knows the free pages of all ranks, so that each knows where every token lies and all run
out of pages at the same call.

A sequence gets the page after its last one where that is free: what lies in a row is read in one piece. A new run
begins in the middle of the largest gap, unless the gap is the whole rank, so that the run before it can grow too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence as Listed
from typing import Any, NamedTuple

import numpy as np

from longmesh.cache.moving import Moved, Moving, places_of
from longmesh.cache.placement import PagePlacement, Span
from longmesh.cache.sequence import GONE, Sequence
from longmesh.errors import LongmeshError


class FreePages:
    """The pages 0, 1, ... of one rank."""

    def __init__(self, num_pages: int) -> None:
        self._starts, self._stops = ([0], [num_pages]) if num_pages else ([], [])
        self._uses = [0] * num_pages
        self.num_free = num_pages

    @property
    def num_pages(self) -> int:
        return len(self._uses)

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free

    def uses(self, page: int) -> int:
        """How many sequences hold a page."""
        return self._uses[page]

    def grow(self, num_pages: int) -> None:
        """Add free pages at the end."""
        start = self.num_pages
        self._uses.extend([0] * num_pages)
        self._add_gap(start, start + num_pages)
        self.num_free += num_pages

    def take(self, after: int | None = None) -> int:
        """A free page, now used once: the one after `after` if it is free. There must be one."""
        assert self.num_free > 0, "whoever takes a page has counted them"
        page = self._choose(after)
        self._uses[page] = 1
        self.num_free -= 1
        return page

    def share(self, page: int) -> None:
        """One more sequence holds the page."""
        assert self._uses[page] > 0, "a free page can't be shared"
        self._uses[page] += 1

    def drop(self, page: int) -> bool:
        """One sequence less holds the page; whether it is free now."""
        assert self._uses[page] > 0, "a page is dropped as often as it was taken"
        self._uses[page] -= 1
        if self._uses[page]:
            return False
        self._add_gap(page, page + 1)
        self.num_free += 1
        return True

    def _choose(self, after: int | None) -> int:
        if after is not None:
            at = bisect_right(self._starts, after + 1) - 1
            if at >= 0 and self._starts[at] <= after + 1 < self._stops[at]:
                return self._cut(at, after + 1)
        sizes = [stop - start for start, stop in zip(self._starts, self._stops, strict=True)]
        at = sizes.index(max(sizes))
        start, stop = self._starts[at], self._stops[at]
        return self._cut(at, start if start == 0 or stop - start < 3 else (start + stop) // 2)

    def _cut(self, at: int, page: int) -> int:
        """Take `page` out of the gap at `at`."""
        start, stop = self._starts[at], self._stops[at]
        parts = [(a, b) for a, b in ((start, page), (page + 1, stop)) if a < b]
        self._starts[at : at + 1] = [a for a, _ in parts]
        self._stops[at : at + 1] = [b for _, b in parts]
        return page

    def _add_gap(self, start: int, stop: int) -> None:
        if start == stop:
            return
        at = bisect_right(self._starts, start)
        if at and self._stops[at - 1] == start:
            at -= 1
            start = self._starts[at]
            del self._starts[at], self._stops[at]
        if at < len(self._starts) and self._starts[at] == stop:
            stop = self._stops[at]
            del self._starts[at], self._stops[at]
        self._starts.insert(at, start)
        self._stops.insert(at, stop)


class Copy(NamedTuple):
    """A page that must be copied on its rank before it is written."""

    rank: int
    source: int
    target: int


def is_whole(value: object) -> bool:
    """Whether this is a whole number, and not True or False."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_sizes(**given: tuple[Any, int]) -> None:
    """Raise unless each is a whole number, as large as the least it may be."""
    for name, (value, least) in given.items():
        if not is_whole(value) or value < least:
            raise LongmeshError(f"PagePool: {name}={value!r}; give a whole number, {least} or more")


class Book:
    """`num_pages` pages of `page` tokens on each of `num_ranks` ranks, and the sequences in them.

    `window`: no query sees more keys than these, itself included; pages that fell out of it are given back.
    """

    def __init__(self, num_ranks: int, num_pages: int, page: int, window: int | None = None) -> None:
        check_sizes(page=(page, 1), num_pages=(num_pages, 0), window=(1 if window is None else window, 1))
        self.page, self.window = page, window
        self.ledgers = [FreePages(num_pages) for _ in range(num_ranks)]
        self._made = 0
        self.live: dict[int, Sequence] = {}  # by name, those that are not freed
        self.moving: Moving | None = None
        self.on_loss: Callable[[int, int], None] | None = (
            None  # told of (rank, page) that is freed or overwritten
        )
        self.on_move: Callable[[Moved], None] | None = None  # and of those that moved

    @property
    def num_ranks(self) -> int:
        return len(self.ledgers)

    @property
    def num_used(self) -> int:
        """Pages in use, on all ranks."""
        return sum(ledger.num_used for ledger in self.ledgers)

    def new(self, asked: int | None = None, *, by_cost: bool = False) -> Sequence:
        """An empty sequence over so many ranks (None: all), beginning on the one with the fewest pages in use."""
        self.check_width(asked)
        width = self.num_ranks if asked is None else asked
        found = self.new_on(self.place(width))
        found.width, found.by_cost = asked, by_cost
        return found

    def check_width(self, width: int | None) -> None:
        """Raise unless a sequence can lie over so many ranks (None: all)."""
        if width is not None and (not is_whole(width) or not 1 <= width <= self.num_ranks):
            raise LongmeshError(
                f"a sequence over width={width!r} ranks; this pool has {self.num_ranks}, so give 1 to "
                f"{self.num_ranks}, or None for all"
            )

    def place(self, width: int) -> PagePlacement:
        """Over the ranks with the fewest pages in use."""
        used = [ledger.num_used for ledger in self.ledgers]
        if width == self.num_ranks:
            first = used.index(min(used))
            return PagePlacement(tuple((first + i) % width for i in range(width)), self.page)
        ranks = sorted(range(self.num_ranks), key=lambda rank: (used[rank], rank))[:width]
        return PagePlacement(tuple(ranks), self.page)

    def new_on(self, placement: PagePlacement) -> Sequence:
        self._made += 1
        width = None if placement.width == self.num_ranks else placement.width
        found = Sequence(placement, [], name=self._made, width=width)
        found.lie(placement, [[] for _ in placement.ranks], self.num_ranks)
        self.live[found.name] = found
        return found

    def fork(self, source: Sequence) -> Sequence:
        """A sequence that begins as `source` does, in the same pages."""
        self.check(source)
        branch = self.new_on(source.placement)
        branch.length, branch.hidden = source.length, source.hidden
        branch.width, branch.by_cost = source.width, source.by_cost
        branch.lie(source.placement, [list(table) for table in source.tables], self.num_ranks)
        source.changed()
        branch.first_page = source.first_page
        for _, (rank, page) in places_of(branch):
            self.ledgers[rank].share(page)
        return branch

    def crop(self, sequence: Sequence, length: int) -> None:
        """Keep the first `length` tokens."""
        self.check_crop(sequence, length)
        placement = sequence.placement
        for slot, table in enumerate(sequence.tables):
            keep = placement.num_pages(slot, length)
            self.drop(placement.ranks[slot], [page for page in table[keep:] if page != GONE])
            del table[keep:]
        sequence.length = length
        sequence.first_page = min(sequence.first_page, -(-length // self.page))
        sequence.hidden = tuple((a, min(b, length)) for a, b in sequence.hidden if a < length)
        sequence.changed()

    def check_crop(self, sequence: Sequence, length: int) -> None:
        """Raise unless `crop` can be done."""
        self.check(sequence)
        if not is_whole(length) or not 0 <= length <= sequence.length:
            raise LongmeshError(
                f"crop to {length} tokens: the sequence has {sequence.length}; give 0 to {sequence.length}"
            )
        least = sequence.first_page * self.page + (self.window or 1) - 1
        if sequence.first_page and 0 < length < min(least, sequence.length):
            raise LongmeshError(
                f"crop to {length} tokens: pages that no window of {self.window} tokens sees any more were given back; "
                f"give {min(least, sequence.length)} or more, or 0"
            )

    def free(self, sequence: Sequence) -> None:
        """Give the sequence's pages back; it can't be used any more."""
        self.crop(sequence, 0)
        sequence.is_free = True
        del self.live[sequence.name]

    def reorder(self, sequences: Listed[Sequence], order: Listed[int]) -> list[Sequence]:
        """``[sequences[i] for i in order]``: those that come again are forked, those that don't come are freed."""
        for sequence in sequences:
            self.check(sequence)
        if len({sequence.name for sequence in sequences}) < len(sequences):
            raise LongmeshError(
                "reorder: the same sequence is given twice; give each once, and its number twice"
            )
        if any(not 0 <= i < len(sequences) for i in order):
            raise LongmeshError(
                f"reorder {list(order)}: there are {len(sequences)} sequences, 0 to {len(sequences) - 1}"
            )
        seen: set[int] = set()
        found = []
        for i in order:
            found.append(self.fork(sequences[i]) if i in seen else sequences[i])
            seen.add(i)
        for i, sequence in enumerate(sequences):
            if i not in seen:
                self.free(sequence)
        return found

    def hide(self, sequence: Sequence, span: Span) -> None:
        """No query sees these positions, which come after those that were hidden before."""
        self.check(sequence)
        if sequence.hidden and sequence.hidden[-1][1] == span[0]:
            sequence.hidden = (*sequence.hidden[:-1], (sequence.hidden[-1][0], span[1]))
        elif span[0] < span[1]:
            sequence.hidden = (*sequence.hidden, span)

    def extend(self, entries: Listed[tuple[Sequence, int]]) -> list[Copy]:
        """Make room for new tokens at the end of sequences, and count them in; what must be copied before."""
        easy: list[tuple[Sequence, int]] = []  # what stays on a page that is the sequence's own
        others: list[tuple[Sequence, int]] = []
        live = self.live
        try:
            for entry in entries:
                sequence, count = entry
                is_easy = (
                    type(count) is int
                    and 0 <= count <= sequence.own_to - sequence.length
                    and live.get(sequence.name) is sequence
                )
                (easy if is_easy else others).append(entry)
            names = {sequence.name for sequence, _ in entries}
        except (AttributeError, TypeError, ValueError) as error:
            raise LongmeshError(
                f"a step of {entries!r:.200}; give a list of (sequence, number of new tokens)"
            ) from error
        if len(names) != len(entries):
            raise LongmeshError("a step has the same sequence twice; give its new tokens in one entry")
        copies: list[Copy] = []
        if others:
            self._make_room(others)
            for sequence, count in others:
                if count:
                    self._extend(sequence, count, copies)
        for sequence, count in easy:
            sequence.length += count
        return copies

    def _make_room(self, entries: Listed[tuple[Sequence, int]]) -> None:
        """Raise unless these entries are in order and there are pages for them."""
        for sequence, count in entries:
            self.check(sequence)
            if not is_whole(count) or count < 0:
                raise LongmeshError(
                    f"a step of {count} tokens; give a whole number, 0 or more, for each sequence"
                )
        for sequence, _ in entries:
            self.give_back(sequence)
        needed = self.needed(entries)
        short = [n - ledger.num_free for n, ledger in zip(needed, self.ledgers, strict=True)]
        if self.moving is not None and max(short) > 0:
            self.moving.cancel()  # copies are no reason to run out of pages
        self._check_room(needed)

    def give_back(self, sequence: Sequence) -> None:
        """Free the pages that no query from now on sees, if there is a window for all."""
        if self.window is None:
            return
        first = max(0, sequence.length - self.window + 1) // self.page
        placement = sequence.placement
        for number in range(sequence.first_page, first):
            index, slot = divmod(number, placement.width)
            table = sequence.tables[slot]
            page, table[index] = table[index], GONE
            self.drop(placement.ranks[slot], [page])
        if first > sequence.first_page:
            sequence.first_page = first
            sequence.changed()

    def needed(self, entries: Iterable[tuple[Sequence, int]]) -> list[int]:
        """How many free pages each rank must have for `extend`."""
        needed = [0] * self.num_ranks
        for sequence, count in entries:
            placement, length = sequence.placement, sequence.length
            page, width = placement.page, placement.width
            if not count:
                continue
            first = -(-length // page)
            for number in range(first, -(-(length + count) // page)):
                needed[placement.ranks[number % width]] += 1
            if length % page and self._is_shared(sequence):
                needed[placement.owner(length)] += 1
        return needed

    def check(self, sequence: Sequence) -> None:
        if sequence.is_free:
            raise LongmeshError("this sequence was freed; make another one with pool.sequence()")
        if self.live.get(sequence.name) is not sequence:
            raise LongmeshError("this sequence is one of another pool; make one with this pool's sequence()")

    def _is_shared(self, sequence: Sequence) -> bool:
        """Whether the page that the next token goes to is another sequence's too."""
        slot = sequence.length // self.page % sequence.placement.width
        return self.ledgers[sequence.placement.ranks[slot]].uses(sequence.tables[slot][-1]) > 1

    def _extend(self, sequence: Sequence, count: int, copies: list[Copy]) -> None:
        placement, length = sequence.placement, sequence.length
        page, width, tables = placement.page, placement.width, sequence.tables
        is_shared = length % page and self._is_shared(sequence)
        first, last = -(-length // page), -(-(length + count) // page)
        if is_shared or first < last:
            sequence.changed()
        if length % page:
            slot = length // page % width
            rank, source = placement.ranks[slot], tables[slot][-1]
            if is_shared:
                tables[slot].pop()
                target = self.ledgers[rank].take(tables[slot][-1] if tables[slot] else None)
                self.ledgers[rank].drop(source)
                tables[slot].append(target)
                copies.append(Copy(rank, source, target))
            else:
                self._lose(rank, source)
        for number in range(first, last):
            slot = number % width
            table = tables[slot]
            table.append(self.ledgers[placement.ranks[slot]].take(table[-1] if table else None))
        sequence.length = length + count
        slot = (last - 1) % width
        sequence.last = (placement.ranks[slot], tables[slot][-1])
        # A move that is under way must know of every write.
        sequence.own_to = last * page if self.moving is None else -1

    def drop(self, rank: int, pages: Listed[int]) -> None:
        """One sequence less holds these pages."""
        for page in pages:
            if self.ledgers[rank].drop(page):
                self._lose(rank, page)

    def _lose(self, rank: int, page: int) -> None:
        """What the page held is gone, or about to be."""
        if self.moving is not None:
            self.moving.forget(rank, page)
        if self.on_loss is not None:
            self.on_loss(rank, page)

    def tell_moved(self, moved: Moved) -> None:
        """What was on these pages is on others now."""
        if self.on_move is not None:
            self.on_move(moved)

    def _check_room(self, needed: Listed[int]) -> None:
        for rank, (pages, ledger) in enumerate(zip(needed, self.ledgers, strict=True)):
            if pages > ledger.num_free:
                raise LongmeshError(
                    f"the pool is full: rank {rank} needs {pages} pages of {self.page} tokens for this step and has "
                    f"{ledger.num_free} of {ledger.num_pages} left; free sequences, or give the pool more num_pages="
                )
