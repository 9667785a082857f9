"""Sets of intervals that belong to ranks, as arrays, so that a whole mesh is handled at once.

An interval of rank r is shifted by r * (seq_len + 1): one sort then orders all ranks, and the gap
of one keeps the last token of a rank from touching the first of the next.
"""

import numpy as np

Array = np.ndarray


def unite(rank: Array, start: Array, stop: Array, seq_len: int) -> tuple[Array, Array, Array]:
    """Per rank, the union of its intervals: sorted, disjoint, touching ones joined."""
    begin, end = start + rank * (seq_len + 1), stop + rank * (seq_len + 1)
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], np.maximum.accumulate(end[order])
    new = np.ones(len(begin), dtype=bool)
    new[1:] = begin[1:] > end[:-1]
    first = np.nonzero(new)[0]
    last = np.append(first[1:], len(begin)) - 1 if len(first) else first
    owner = begin[first] // (seq_len + 1)
    base = owner * (seq_len + 1)
    return owner, begin[first] - base, end[last] - base


def offsets_within(group: Array, size: Array) -> Array:
    """Where each row starts if the rows of a group (they are consecutive) are laid end to end."""
    before = np.cumsum(size) - size
    new = np.ones(len(group), dtype=bool)
    new[1:] = group[1:] != group[:-1]
    return before - before[new][np.cumsum(new) - 1] if len(group) else before


def spans(start: Array, size: Array) -> Array:
    """start, start + 1, ... of each interval, one after the other."""
    before = np.cumsum(size) - size
    return np.arange(int(size.sum())) + np.repeat(start - before, size)


def covered_before(start: Array, stop: Array, at: Array) -> Array:
    """For each place, how much of all the intervals lies before it; what several cover counts several times."""

    def risen(bound: Array) -> Array:
        bound = np.sort(bound)
        total = np.concatenate([[0], np.cumsum(bound)])
        number = np.searchsorted(bound, at)
        return number * at - total[number]

    return risen(start) - risen(stop)


def least_over(start: Array, stop: Array, value: Array) -> tuple[Array, Array, Array]:
    """The least value among the intervals that cover each place: (start, stop, value) of disjoint cells, in order.

    Places that nothing covers are left out. An interval of 2^k cells or more is two of exactly 2^k that overlap, so
    each is written down twice, at its k, and the tables of each k are then folded into the one below.
    """
    bounds = np.unique(np.concatenate([start, stop]))
    cells = len(bounds) - 1
    if cells < 1:
        return start[:0], stop[:0], value[:0]
    a, b = np.searchsorted(bounds, start), np.searchsorted(bounds, stop)
    power = np.log2(np.maximum(b - a, 1)).astype(np.int64)
    none = np.iinfo(np.int64).max
    above = np.full(cells, none)
    for k in range(int(power.max()), -1, -1):
        here = np.full(cells, none)
        mine = power == k
        np.minimum.at(here, a[mine], value[mine])
        np.minimum.at(here, b[mine] - (1 << k), value[mine])
        np.minimum(here, above, out=here)
        np.minimum(here[1 << k :], above[: -(1 << k)], out=here[1 << k :])
        above = here
    known = above != none
    return bounds[:-1][known], bounds[1:][known], above[known]
