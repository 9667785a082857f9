"""The plan of one step: who writes which tokens, who sees which keys, and who sends which rows. Pure arithmetic.

    step: sequences of 1, 3 and 2 new tokens        rows   0 | 1 2 3 | 4 5
    their keys on rank 1: yes, none, yes            rank 1 computes and sends rows 0, 4, 5

Every rank computes the same plan from the books, once per step and kind of mask; layers only use it. Whether a rank
takes part in a sequence follows from global lengths, never from what it holds.
"""

from __future__ import annotations

from collections.abc import Sequence as Listed
from functools import cached_property
from typing import NamedTuple

import numpy as np

from longmesh.cache.placement import Placement, Span
from longmesh.cache.sequence import Sequence


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


class StepPlan:
    """The rows of a step in order of its entries, and for each kind of mask who takes part."""

    def __init__(self, sequences: Listed[tuple[Sequence, int]], num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.entries: list[Entry] = []
        row = 0
        for sequence, count in sequences:  # their lengths have the new tokens in them
            self.entries.append(Entry(sequence, row, sequence.length - count, count))
            row += count
        self.num_rows = row
        self._shares: dict[int | None, Shares] = {}

    def writes(self, rank: int) -> list[Write]:
        """Where a rank puts which new tokens."""
        found: list[Write] = []
        for sequence, row, start, count in self.entries:
            placement = sequence.placement
            page, width = placement.page, placement.width
            if count == 1:
                number, offset = divmod(start, page)
                slot = number % width
                if placement.ranks[slot] == rank:
                    found.append(Write(row, 1, sequence.tables[slot][number // width], offset))
                continue
            for number in range(start // page, -(-(start + count) // page)):
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

    def __init__(self, plan: StepPlan, window: int | None) -> None:
        self.plan, self.window = plan, window
        self.takes_part = _takes_part(plan, window)

    def keys(self, rank: int) -> list[Keys]:
        """What a rank computes."""
        found: list[Keys] = []
        for number in np.flatnonzero(self.takes_part[rank]).tolist():
            entry = self.plan.entries[number]
            placement = entry.sequence.placement
            slot = placement.ranks.index(rank)
            spans = entry.sequence.visible(first_seen(entry, self.window), entry.stop)
            found.append(Keys(entry, slot, tuple(placement.local_spans(slot, spans))))
        return found

    @cached_property
    def num_rows(self) -> list[int]:
        """The rows that each rank computes and sends."""
        counts = np.array([entry.num_tokens for entry in self.plan.entries], dtype=np.int64)
        return (self.takes_part @ counts).tolist() if len(counts) else [0] * self.plan.num_ranks

    def rows(self, rank: int) -> np.ndarray:
        """The rows that a rank computes and sends, in order."""
        entries = self.plan.entries
        parts = [
            np.arange(entries[i].row, entries[i].row + entries[i].num_tokens)
            for i in np.flatnonzero(self.takes_part[rank])
        ]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def first_seen(entry: Entry, window: int | None) -> int:
    """The first position that some query of an entry sees."""
    return 0 if window is None else max(0, entry.start - window + 1)


def _takes_part(plan: StepPlan, window: int | None) -> np.ndarray:
    """(ranks, entries): whether a rank holds a key that some query of the entry sees."""
    found = np.zeros((plan.num_ranks, len(plan.entries)), dtype=bool)
    groups: dict[Placement, list[int]] = {}
    for number, (sequence, _, _, count) in enumerate(plan.entries):
        if sequence.hidden:
            entry = plan.entries[number]
            spans = sequence.visible(first_seen(entry, window), entry.stop)
            for slot, rank in enumerate(sequence.placement.ranks):
                found[rank, number] = bool(count and sequence.placement.local_spans(slot, spans))
        elif count:
            groups.setdefault(sequence.placement, []).append(number)
    for placement, numbers in groups.items():
        stops = np.array([plan.entries[i].stop for i in numbers], dtype=np.int64)
        starts = np.array([first_seen(plan.entries[i], window) for i in numbers], dtype=np.int64)
        slots = np.arange(placement.width)[:, None]
        seen = _local(placement, slots, stops) > _local(placement, slots, starts)
        found[np.ix_(placement.ranks, numbers)] = seen
    return found


def _local(placement: Placement, slots: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """`Placement.local` of many slots and lengths."""
    around, rest = np.divmod(lengths, placement.width * placement.page)
    return around * placement.page + np.clip(rest - slots * placement.page, 0, placement.page)
