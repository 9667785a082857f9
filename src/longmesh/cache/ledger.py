"""Which pages of a rank are free, and how many sequences use the others. Pure.

Every rank keeps the ledgers of all ranks, and keeps them alike, so that each knows where every token lies and all run
out of pages at the same call.

A sequence gets the page after its last one where that is free: what lies in a row is read in one piece. A new run
begins in the middle of the largest gap, unless the gap is the whole ledger, so that the run before it can grow too.
"""

from __future__ import annotations

from bisect import bisect_right


class Ledger:
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
