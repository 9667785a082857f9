"""Needs: which keys every rank needs, and the stretches of buffers in which they arrive.

    rank 3 needs   |----------------------------|          one interval, though many ranks own it
    it owns                 |----|        |---|
    stretches      |--------|    |--------|   |-|          what arrives, in the order of the coordinates

Needs and stretches are as many as the pieces that ranks own, not as the pairs of ranks that talk. Who sends what is
found for one rank at a time: its stretches cut by owner (`received`), or everybody's stretches cut to what it owns
(`lent`). Both list the same fragments in the same order.
"""

import dataclasses
import functools
from typing import NamedTuple

import numpy as np

from longmesh.attention.exchange.fragment import AT, OFFSET, OWNER, RANK, STAGE, START, STOP
from longmesh.attention.layout.base import Ownership
from longmesh.attention.mask.slices import overlaps
from longmesh.attention.plan.cached_values import kept_by_instance
from longmesh.attention.plan.intervals import offsets_within, unite

Array = np.ndarray


class Stretches(NamedTuple):
    """Coordinates [start, stop) lie at `offset` of a rank's buffer of a stage. Sorted by rank, stage, offset."""

    rank: Array
    stage: Array
    start: Array
    stop: Array
    offset: Array

    def of(self, rank: int) -> "Stretches":
        """Those of one rank."""
        low, high = np.searchsorted(self.rank, (rank, rank + 1))
        return Stretches(*(column[low:high] for column in self))


@dataclasses.dataclass(frozen=True, eq=False)
class Needs:
    """Keys [start, stop) are needed by `rank`, its own among them: disjoint, sorted by rank and start."""

    owned: Ownership
    rank: Array
    start: Array
    stop: Array

    @staticmethod
    def of(rank: Array, start: Array, stop: Array, owned: Ownership) -> "Needs":
        """From intervals that may overlap."""
        return Needs(owned, *unite(rank, start, stop, owned.seq_len))

    @functools.cached_property
    def remote(self) -> tuple[Array, Array, Array]:
        """(rank, start, stop) of what a rank needs and does not own."""
        width, table = self.owned.seq_len + 1, self.owned.table
        needed, held = self.rank * width, table[:, 2] * width
        at = np.concatenate([needed + self.start, needed + self.stop, held + table[:, 0], held + table[:, 1]])
        change = np.repeat([2, -2, -1, 1], [len(self.rank)] * 2 + [len(table)] * 2)
        order = np.argsort(at, kind="stable")
        at, state = at[order], np.cumsum(change[order])
        # Needed and not owned is 2; between the ranks nothing is either.
        wanted = (state[:-1] == 2) & (at[:-1] < at[1:])
        begin, end = at[:-1][wanted], at[1:][wanted]
        rank = begin // width
        return unite(rank, begin - rank * width, end - rank * width, self.owned.seq_len)

    @functools.cached_property
    def remote_tokens(self) -> Array:
        """For each rank, how many keys it needs of others."""
        rank, start, stop = self.remote
        return np.bincount(rank, weights=stop - start, minlength=self.owned.num_ranks).astype(np.int64)

    @kept_by_instance
    def dealt(self, count: int) -> Stretches:
        """What each rank needs of others, dealt evenly and in order to stages 1 to `count`."""
        rank, start, stop = self.remote
        total, size = self.remote_tokens, stop - start
        before = offsets_within(rank, size)
        parts: list[Array] = []
        for part in range(count):
            low, high = (total * part // count)[rank], (total * (part + 1) // count)[rank]
            first, last = np.clip(low - before, 0, size), np.clip(high - before, 0, size)
            columns = rank, np.full_like(rank, part + 1), start + first, start + last, before + first - low
            parts.append(np.stack(columns)[:, first < last])
        found = np.concatenate(parts, axis=1)
        return Stretches(*found[:, np.lexsort((found[4], found[1], found[0]))])

    @functools.cached_property
    def everything(self) -> "Needs":
        """Every key for every rank, if any rank needs one of another; else nothing."""
        ranks = np.arange(self.owned.num_ranks if self.remote_tokens.any() else 0)
        return Needs(self.owned, ranks, np.zeros_like(ranks), np.full_like(ranks, self.owned.seq_len))


def received(stretches: Stretches, rank: int, owned: Ownership) -> Array:
    """The fragments in a rank's buffers, by stage and offset."""
    return _fragments(stretches.of(rank), owned.table)


def lent(stretches: Stretches, owner: int, owned: Ownership) -> Array:
    """The fragments of a rank's keys in others' buffers, by rank, stage and offset."""
    return _fragments(stretches, owned.pieces_of(owner))


def whole_fragments(needs: Needs) -> Array:
    """Every fragment that a rank needs and another owns, in no stage yet."""
    rank, start, stop = needs.remote
    none = np.zeros_like(rank)
    return _fragments(Stretches(rank, none, start, stop, none), needs.owned.table)


def _fragments(stretches: Stretches, table: Array) -> Array:
    """Stretches cut by rows (start, stop, rank, local offset) of an ownership's table."""
    a, b = overlaps(stretches.start, stretches.stop, table[:, 0], table[:, 1])
    start = np.maximum(stretches.start[a], table[b, 0])
    stop = np.minimum(stretches.stop[a], table[b, 1])
    to_local = table[b, 3] - table[b, 0]
    out = np.empty((len(a), 7), dtype=np.int64)
    out[:, RANK], out[:, STAGE], out[:, OWNER] = stretches.rank[a], stretches.stage[a], table[b, 2]
    out[:, START], out[:, STOP], out[:, AT] = start + to_local, stop + to_local, start
    out[:, OFFSET] = stretches.offset[a] + start - stretches.start[a]
    return out


def join_fragments(fragments: Array) -> Stretches:
    """The stretches that fragments, by rank, stage and offset, make up."""
    stop = fragments[:, AT] + fragments[:, STOP] - fragments[:, START]
    new = np.ones(len(fragments), dtype=bool)
    new[1:] = fragments[1:, AT] != stop[:-1]
    for column in (RANK, STAGE):
        new[1:] |= fragments[1:, column] != fragments[:-1, column]
    first = np.nonzero(new)[0]
    last = np.append(first[1:], len(fragments)) - 1 if len(first) else first
    f = fragments[first]
    return Stretches(f[:, RANK], f[:, STAGE], f[:, AT], stop[last], f[:, OFFSET])


def join_stretches(parts: list[Stretches]) -> Stretches:
    """The stretches of one rank after another."""
    return Stretches(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
