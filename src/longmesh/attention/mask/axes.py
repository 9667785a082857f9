"""Axes: how many queries and how many keys there are, and where the first query stands among the keys.

    keys       0 1 2 3 4 5 6 7 8 9         queries 0, 1 and 2 stand at positions 7, 8 and 9: they are the last ones
    queries                  0 1 2         (q_offset 7). Masks speak of positions; plans of the numbers 0, 1, 2

A sequence that attends to itself has as many queries as keys and q_offset 0.
"""

from typing import NamedTuple

import numpy as np

from longmesh.attention.mask.base import Mask, slices_between, slices_of
from longmesh.attention.mask.slices import Q0, Q1, shift_band
from longmesh.errors import LongmeshError


class SequenceAxes(NamedTuple):
    """`seq_len` queries and `kv_len` keys; query i stands at position `i + q_offset` of the keys."""

    seq_len: int
    kv_len: int
    q_offset: int = 0

    @property
    def is_one_sequence(self) -> bool:
        """Whether queries and keys are the same tokens, as far as a mask can tell."""
        return self.seq_len == self.kv_len and self.q_offset == 0

    def __str__(self) -> str:
        if self.is_one_sequence:
            return f"{self.seq_len} tokens"
        where = f", the first at position {self.q_offset}" if self.q_offset else ""
        return f"{self.seq_len} queries and {self.kv_len} keys{where}"


def axes_of(mask: Mask, seq_len: int, kv_len: int | None, q_offset: int | None) -> SequenceAxes:
    """The axes, with what was not given filled in: as many keys as queries, the last ones at the end of the keys."""
    keys = seq_len if kv_len is None else kv_len
    if q_offset is None:
        if mask.numbers_queries == "both" and keys != seq_len:
            raise LongmeshError(
                f"mask {mask}: a part of it numbers queries from 0 (a BlockMask, documents with kv_lengths), another "
                f"by where they stand among {keys} keys; put the other part into within=, or give q_offset=0 if it "
                "numbers queries from 0, too"
            )
        q_offset = 0 if mask.numbers_queries else keys - seq_len
    if q_offset and mask.numbers_queries:
        raise LongmeshError(
            f"q_offset={q_offset}: mask {mask} numbers queries from 0 by itself; leave q_offset= out"
        )
    return SequenceAxes(seq_len, keys, q_offset)


def slices_on(mask: Mask, axes: SequenceAxes, row: int = 0, num_heads: int = 1) -> np.ndarray:
    """The visible pairs of a batch row as slices, queries and keys both numbered from 0."""
    if axes.is_one_sequence:
        return slices_of(mask, axes.seq_len, row=row, num_heads=num_heads)
    first = axes.q_offset
    found = slices_between(
        mask, first, first + axes.seq_len, axes.kv_len, row=row, num_heads=num_heads
    ).copy()
    found[:, [Q0, Q1]] -= first
    return shift_band(found, np.full(len(found), first))
