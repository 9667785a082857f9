"""The plan of one step: who writes which tokens, who sees which keys, and who sends which rows. Pure arithmetic.

    step: sequences of 1, 3 and 2 new tokens        rows   0 | 1 2 3 | 4 5
    their keys on rank 1: yes, none, yes            rank 1 computes and sends rows 0, 4, 5

Every rank computes the same plan from the books, once per step and kind of mask; layers only use it. Whether a rank
takes part in a sequence follows from global lengths, never from what it holds.
"""

from __future__ import annotations

from collections.abc import Sequence as Listed
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from operator import sub
from typing import NamedTuple

import numpy as np

from longmesh.cache.placement import Span
from longmesh.cache.sequence import Sequence
from longmesh.comm.collectives import range_split
from longmesh.plan import Cluster


class Entry(NamedTuple):
    """New tokens of a sequence: rows ``[row, row + num_tokens)`` of the step, positions from `start` on."""

    sequence: Sequence
    row: int
    start: int
    num_tokens: int

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens


class Write(NamedTuple):
    """Rows of the step that go to one page of a rank, from `offset` on."""

    row: int
    num_tokens: int
    page: int
    offset: int


class Keys(NamedTuple):
    """What a rank computes for an entry: the local tokens that some of its queries see, as spans in order."""

    entry: Entry
    slot: int
    spans: tuple[Span, ...]


# Values of known lengths, made without a call of Python: there is one for each sequence of every step.
_entry, _keys = partial(tuple.__new__, Entry), partial(tuple.__new__, Keys)


def heads_of(num_heads: int, num_ranks: int) -> list[int]:
    """How many heads each rank merges, the first ones first."""
    return [len(part) for part in range_split(num_heads, num_ranks)]


@dataclass(frozen=True, eq=False)
class CacheStep:
    """The rows of a step in order of its entries, for each kind of mask who takes part, and how results are merged."""

    num_ranks: int
    cluster: Cluster
    sequences: list[Sequence]
    counts: list[int]
    stops: list[int]  # of the sequences, the new tokens included
    entries: list[Entry]
    num_rows: int
    _shares: dict[int | None, Shares] = field(
        default_factory=dict, repr=False
    )  # by window, as they are asked for

    @staticmethod
    def of(sequences: Listed[tuple[Sequence, int]], num_ranks: int, cluster: Cluster) -> CacheStep:
        """The plan of new tokens, which are in their sequences already; `cluster` decides how results are merged."""
        held = [sequence for sequence, _ in sequences]
        counts = [count for _, count in sequences]
        stops = [sequence.length for sequence in held]
        ends = list(accumulate(counts))
        starts, rows = map(sub, stops, counts), map(sub, ends, counts)
        entries: list[Entry] = list(map(_entry, zip(held, rows, starts, counts, strict=True)))
        return CacheStep(num_ranks, cluster, held, counts, stops, entries, ends[-1] if ends else 0)

    def writes(self, rank: int) -> list[Write]:
        """Where a rank puts which new tokens."""
        found: list[Write] = []
        for sequence, row, start, count in self.entries:
            if count == 1:
                of_rank, number = sequence.last
                if of_rank == rank:
                    found.append(Write(row, 1, number, start % sequence.placement.page))
                continue
            placement = sequence.placement
            page, width = placement.page, placement.width
            for number in range(start // page, -(-(start + count) // page)) if count else ():
                slot = number % width
                if placement.ranks[slot] == rank:
                    a, b = max(start, number * page), min(start + count, (number + 1) * page)
                    table = sequence.tables[slot]
                    found.append(Write(row + a - start, b - a, table[number // width], a - number * page))
        return found

    def shares(self, window: int | None) -> Shares:
        """Who takes part where queries see `window` keys up to themselves (None: all)."""
        found = self._shares.get(window)
        if found is None:
            found = self._shares[window] = Shares(self, window)
        return found


class Shares:
    """For one kind of mask: which rank has keys for which entries."""

    def __init__(self, plan: CacheStep, window: int | None) -> None:
        self.plan, self.window = plan, window
        held = plan.sequences
        self._hidden = [i for i, sequence in enumerate(held) if sequence.hidden]
        self._stops = np.array(plan.stops, dtype=np.int64)
        self._starts = np.zeros(len(held), dtype=np.int64)  # the first position that some query sees
        if window is not None:
            self._starts = np.maximum(0, self._stops - np.array(plan.counts, dtype=np.int64) - window + 1)
        # (entries, ranks): the slot of each rank, far out where the sequence does not lie
        slots = [sequence.slots for sequence in held] or [np.zeros(0, np.int64)]
        self._slots = np.concatenate(slots).reshape(len(held), plan.num_ranks)
        self._page = held[0].placement.page if held else 1
        self._widths = np.array([len(sequence.tables) for sequence in held], dtype=np.int64)
        self.takes_part = self._find_parts()
        self._by_heads: dict[tuple[int, int, tuple[int, int]], bool] = {}

    def _find_parts(self) -> np.ndarray:
        """(ranks, entries): whether a rank holds a key that some query of the entry sees."""
        stops, counts = self._stops[:, None], self.plan.counts
        if self.window is None:
            found = stops > self._slots * self._page
        else:
            widths = self._widths[:, None]
            seen, before = (self._local(self._slots, widths, at) for at in (stops, self._starts[:, None]))
            found = (seen > before) & (self._slots < widths)
        if 0 in counts:
            found[np.array(counts) == 0] = False
        for number in self._hidden:
            entry = self.plan.entries[number]
            for slot, rank in enumerate(entry.sequence.placement.ranks):
                found[number, rank] = bool(entry.num_tokens and self._spans(number, slot))
        return found.T

    def _local(self, slots: np.ndarray, widths: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """`Placement.local` of many sequences."""
        around, rest = np.divmod(lengths, widths * self._page)
        return around * self._page + np.minimum(np.maximum(rest - slots * self._page, 0), self._page)

    def _spans(self, number: int, slot: int) -> tuple[Span, ...]:
        """Of a sequence that hides some of its tokens: the local tokens that are seen."""
        entry = self.plan.entries[number]
        spans = entry.sequence.visible(int(self._starts[number]), entry.stop)
        return tuple(entry.sequence.placement.local_spans(slot, spans))

    def keys(self, rank: int) -> list[Keys]:
        """What a rank computes."""
        mine = np.flatnonzero(self.takes_part[rank])
        slots, widths = self._slots[mine, rank], self._widths[mine]
        stops = self._local(slots, widths, self._stops[mine]).tolist()
        starts = [0] * len(stops)
        if self.window is not None:
            starts = self._local(slots, widths, self._starts[mine]).tolist()
        numbers, slots = mine.tolist(), slots.tolist()
        entries = self.plan.entries
        spans: list[tuple[Span, ...]] = [(span,) for span in zip(starts, stops, strict=True)]
        for i, number in enumerate(numbers) if self._hidden else ():
            if number in self._hidden:
                spans[i] = self._spans(number, slots[i])
        return list(map(_keys, zip([entries[i] for i in numbers], slots, spans, strict=True)))

    def merges_by_heads(self, num_heads: int, v_head_dim: int, sizes: tuple[int, int]) -> bool:
        """Whether two collectives, by heads, take less time than one.

        `sizes`: bytes of an element, of partial results and of results.
        """
        key = num_heads, v_head_dim, sizes
        if key not in self._by_heads:
            self._by_heads[key] = self.plan.num_ranks > 1 and self._is_cheaper(*key)
        return self._by_heads[key]

    def _is_cheaper(self, num_heads: int, v_head_dim: int, sizes: tuple[int, int]) -> bool:
        ranks, (wide, narrow) = self.plan.num_ranks, sizes
        part = (v_head_dim + 1) * wide
        rows, most = sum(self.num_rows), max(heads_of(num_heads, ranks))
        one = (rows - min(self.num_rows)) * num_heads * part
        first = (rows - min(self.num_rows)) * most * part
        second = self.plan.num_rows * (num_heads - num_heads // ranks) * v_head_dim * narrow

        def time_us(collective: str, num_bytes: int) -> float:
            return self.plan.cluster.collective_us(collective, (ranks,), (0,), num_bytes)

        return time_us("all_to_all", first) + time_us("all_gather", second) < time_us("all_gather", one)

    @cached_property
    def num_rows(self) -> list[int]:
        """The rows that each rank computes and sends."""
        counts = self.plan.counts
        if counts.count(1) == len(counts):
            return self.takes_part.sum(1).tolist()
        return (self.takes_part @ np.array(counts, dtype=np.int64)).tolist()

    def rows(self, rank: int) -> np.ndarray:
        """The rows that a rank computes and sends, in order."""
        entries = self.plan.entries
        parts = [
            np.arange(entries[i].row, entries[i].row + entries[i].num_tokens)
            for i in np.flatnonzero(self.takes_part[rank])
        ]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
