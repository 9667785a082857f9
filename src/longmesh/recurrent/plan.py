"""Who passes a state to whom, decided from lengths and documents alone.

    tokens     0 1 2 3 | 4 5 6 7 | 8 9 . .      three ranks, documents of 3 and 7 tokens
    documents  a a a b | b b b b | b b

    rank 0 holds the start of b: it passes on its end, U
    rank 1 lies inside b:        what comes in passes through, T and U
    rank 2 receives U of rank 0, T and U of rank 1, and folds them: its state is T1 U0 + U1

A span maps the state that enters it to the one that leaves it, S_out = T S_in + U. Only spans that a document
connects exchange anything. Backward sends the gradients of states the other way, over the same links.

Pitfall: a plan speaks of *elements per state*; their number is known when a kernel is called (`Traffic`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from longmesh.errors import LongmeshError

Starts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class RecurrentPlan:
    """`bounds`: rank r holds the tokens bounds[r] to bounds[r + 1]. `starts`: per row, where documents begin, after 0.

    One row stands for all rows of a batch; several, for one each.

    >>> plan = plan_recurrent(seq_len=10, ranks=3, documents=[3, 7])
    >>> plan.span(1), plan.chain(0, 2, backward=False), plan.crosses
    ((4, 7), (1, 0), True)
    """

    seq_len: int
    bounds: tuple[int, ...]
    starts: Starts

    @property
    def num_ranks(self) -> int:
        """How many ranks the sequence is cut over."""
        return len(self.bounds) - 1

    def span(self, rank: int) -> tuple[int, int]:
        """The tokens of a rank: first, and after last."""
        return self.bounds[rank], self.bounds[rank + 1]

    @functools.cached_property
    def links(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """`links[row][rank]`: the ranks whose tokens the state entering `rank` comes from, nearest first."""
        return tuple(
            tuple(self._sources(row, rank) for rank in range(self.num_ranks))
            for row in range(len(self.starts))
        )

    def _sources(self, row: int, rank: int) -> tuple[int, ...]:
        start, stop = self.span(rank)
        starts = self.starts[row]
        if start == stop or start == 0 or _begins(starts, start):
            return ()
        found: list[int] = []
        for other in range(rank - 1, -1, -1):
            first, after = self.span(other)
            if first == after:
                continue
            found.append(other)
            if first == 0 or _any_between(starts, first, after):
                break
        return tuple(found)

    def chain(self, row: int, rank: int, *, backward: bool) -> tuple[int, ...]:
        """The ranks that `rank` hears from, nearest first: those before it, or in backward those after it."""
        if not backward:
            return self.links[row][rank]
        later = range(rank + 1, self.num_ranks)
        return tuple(other for other in later if rank in self.links[row][other])

    @functools.cached_property
    def crosses(self) -> bool:
        """Whether any document connects two ranks."""
        return any(sources for row in self.links for sources in row)

    def reach(self, rank: int, width: int) -> int:
        """How many of the `width` tokens before a rank's first one belong to a document that goes on there."""
        start, stop = self.span(rank)
        if start == stop:
            return 0
        return max(
            min(width, start - max((s for s in (0, *starts) if s <= start), default=0))
            for starts in self.starts
        )

    def marks(self, rank: int) -> np.ndarray | None:
        """(rows, tokens): True where a document begins among this rank's tokens; None if none does."""
        return self._marks(*self.span(rank))

    def marks_before(self, rank: int, width: int) -> np.ndarray | None:
        """The same with the `width` positions before them; before the sequence's first token nothing begins."""
        start, stop = self.span(rank)
        return self._marks(start - width, stop)

    def _marks(self, start: int, stop: int) -> np.ndarray | None:
        marks = np.zeros((len(self.starts), stop - start), dtype=bool)
        for row, starts in enumerate(self.starts):
            marks[row, [s - start for s in starts if start <= s < stop]] = True
        return marks if marks.any() else None


def plan_recurrent(
    *,
    seq_len: int,
    ranks: int,
    documents: Sequence[int] | Sequence[Sequence[int]] | None = None,
) -> RecurrentPlan:
    """Plan for `seq_len` tokens in order over `ranks`. Pure.

    Documents are given by their lengths, once or for each row of the batch.

    >>> plan = plan_recurrent(seq_len=10, ranks=3, documents=[3, 7])
    >>> plan.bounds, plan.links[0]
    ((0, 4, 7, 10), ((), (0,), (1, 0)))
    """
    if seq_len < 0 or ranks < 1:
        raise LongmeshError(
            f"plan_recurrent(seq_len={seq_len}, ranks={ranks}): give a length of 0 or more and at least 1 rank"
        )
    size, longer = divmod(seq_len, ranks)
    bounds = tuple(r * size + min(r, longer) for r in range(ranks + 1))
    return RecurrentPlan(seq_len, bounds, _starts(seq_len, documents))


def documents_of_positions(positions: Tensor, seq_len: int) -> list[list[int]]:
    """Lengths of the documents of each row, which begin where positions do not go on by one.

    >>> documents_of_positions(torch.tensor([0, 1, 2, 0, 1]), 5)
    [[3, 2]]
    """
    rows = positions.reshape(-1, positions.shape[-1]).cpu().numpy()
    if rows.shape[1] != seq_len:
        raise LongmeshError(
            f"positions of {rows.shape[1]} tokens and a sequence of {seq_len}; give the positions of the whole sequence"
        )
    found: list[list[int]] = []
    for row in rows:
        begins = np.flatnonzero(np.diff(row) != 1) + 1
        found.append(np.diff(np.array([0, *begins.tolist(), seq_len])).tolist())
    return found


def _starts(seq_len: int, documents: Sequence[int] | Sequence[Sequence[int]] | None) -> Starts:
    if documents is None:
        return ((),)
    given: list[object] = list(documents)
    rows = [given] if all(isinstance(n, (int, np.integer)) for n in given) else given
    found: list[tuple[int, ...]] = []
    for row in rows:
        lengths = [int(n) for n in row]  # pyright: ignore[reportGeneralTypeIssues]
        if sum(lengths) != seq_len or any(n < 0 for n in lengths):
            raise LongmeshError(
                f"documents of {lengths} tokens are {sum(lengths)} in all, and the sequence has {seq_len}; give the "
                "length of every document, padding included"
            )
        ends = np.cumsum(lengths)[:-1] if lengths else []
        found.append(tuple(sorted({int(end) for end in ends if 0 < end < seq_len})))
    return tuple(found)


def _begins(starts: tuple[int, ...], position: int) -> bool:
    place = int(np.searchsorted(starts, position))
    return place < len(starts) and starts[place] == position


def _any_between(starts: tuple[int, ...], first: int, after: int) -> bool:
    place = int(np.searchsorted(starts, first))
    return place < len(starts) and starts[place] < after
