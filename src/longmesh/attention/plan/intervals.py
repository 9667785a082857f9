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
