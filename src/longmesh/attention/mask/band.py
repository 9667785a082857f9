"""Bands: the masks that depend only on how far a key is from its query.

    full            causal          sliding_window(2)
    # # # # #       # . . . .       # . . . .
    # # # # #       # # . . .       # # . . .
    # # # # #       # # # . .       # # # . .
    # # # # #       # # # # .       . # # # .
    # # # # #       # # # # #       . . # # #

Pitfall: `sliding_window(left)` shows the query's own key and the `left` before it, `left + 1` in all.
"""

import dataclasses

import numpy as np

from longmesh.attention.mask.base import Mask
from longmesh.attention.mask.block import UNBOUNDED
from longmesh.attention.mask.slices import make_slices
from longmesh.errors import LongmeshError, whole_number


@dataclasses.dataclass(frozen=True)
class Band(Mask):
    """Key j is visible to query i when lo <= j - i <= hi."""

    lo: int = -UNBOUNDED
    hi: int = UNBOUNDED

    def band(self) -> tuple[int, int]:
        return self.lo, self.hi

    def slices(self, seq_len: int, *, row: int = 0, num_heads: int = 1) -> np.ndarray:
        return make_slices((0, seq_len, 0, seq_len, self.lo, self.hi))

    def slices_between(
        self, start: int, stop: int, kv_len: int, *, row: int = 0, num_heads: int = 1
    ) -> np.ndarray:
        return make_slices((start, stop, 0, kv_len, self.lo, self.hi))

    def visible(self, b, h, q_idx, kv_idx):
        distance = kv_idx - q_idx
        return (distance >= self.lo) & (distance <= self.hi)

    def __str__(self) -> str:
        match (self.lo, self.hi):
            case (low, high) if low == -UNBOUNDED and high == UNBOUNDED:
                return "full()"
            case (low, 0) if low == -UNBOUNDED:
                return "causal()"
            case (low, high):
                return f"sliding_window({-low}, {high})"


def full() -> Mask:
    """Every query sees every key.

    >>> i, j = torch.arange(4)[:, None], torch.arange(4)
    >>> masks.full().visible(0, 0, i, j).all()
    tensor(True)
    """
    return Band()


def causal() -> Mask:
    """A query sees its own key and those before it.

    >>> i, j = torch.arange(4)[:, None], torch.arange(4)
    >>> masks.causal().visible(0, 0, i, j).long()
    tensor([[1, 0, 0, 0],
            [1, 1, 0, 0],
            [1, 1, 1, 0],
            [1, 1, 1, 1]])
    """
    return Band(hi=0)


def sliding_window(left: int, right: int = 0) -> Mask:
    """A query sees `left` keys before its own, its own, and `right` keys after it.

    >>> i, j = torch.arange(4)[:, None], torch.arange(4)
    >>> masks.sliding_window(1).visible(0, 0, i, j).long()
    tensor([[1, 0, 0, 0],
            [1, 1, 0, 0],
            [0, 1, 1, 0],
            [0, 0, 1, 1]])
    """
    left, right = whole_number("sliding_window(left)", left), whole_number("sliding_window(right)", right)
    if left < 0 or right < 0:
        raise LongmeshError(f"sliding_window({left}, {right}): both distances must be 0 or more")
    return Band(lo=-left, hi=right)
