"""Mask: a frozen, hashable value that says which key a query sees, and the `&` and `|` of two.

A mask is known in two ways that must agree. `slices(seq_len)` is exact interval arithmetic and is
what planning uses; `visible(b, h, q_idx, kv_idx)` is the definition for each pair, in torch, and is
what a kernel asks inside an elementwise block. Positions are global, whatever the layout.

Pitfall: an elementwise block asks the *whole* mask, not the part it came from; so the slices of a
mask are disjoint, elementwise ones included.
"""

import abc
import dataclasses
from typing import Any, Literal

import numpy as np

from longmesh.attention.mask.block import UNBOUNDED
from longmesh.attention.mask.slices import clip, intersect, union
from longmesh.attention.user_written import check_slices, is_user_written
from longmesh.errors import LongmeshError


class Mask(abc.ABC):
    """Which keys each query sees. Combine masks with `&` and `|`.

    >>> mask = masks.causal() & masks.sliding_window(100)
    >>> isinstance(mask, masks.Mask), mask.band()
    (True, (-100, 0))
    """

    @abc.abstractmethod
    def slices(self, seq_len: int, *, row: int = 0, num_heads: int = 1) -> np.ndarray:
        """The visible pairs of batch row `row` as disjoint slices (see mask/slices.py)."""

    @abc.abstractmethod
    def visible(self, b, h, q_idx, kv_idx) -> Any:
        """FlexAttention's `mask_mod`: tensors of indices that broadcast, to a boolean tensor."""

    def slices_between(
        self, start: int, stop: int, kv_len: int, *, row: int = 0, num_heads: int = 1
    ) -> np.ndarray:
        """The visible pairs of queries at positions [start, stop) and keys [0, kv_len): disjoint slices of positions.

        Queries may stand before the first key or behind the last one. Unless a mask knows better, they are rows of the
        mask over all these positions, and one before the first key sees nothing.
        """
        whole = slices_of(self, max(stop, kv_len), row=row, num_heads=num_heads)
        return clip(whole, (start, stop), (0, kv_len))

    @property
    def num_rows(self) -> int:
        """1, or the batch rows that each have slices of their own."""
        return 1

    @property
    def numbers_queries(self) -> Literal["", "all", "both"]:
        """ "all" if the mask numbers queries from 0 whatever the keys, "" if it speaks of where they stand among the
        keys, "both" if one part of it does this and another that."""
        return ""

    def band(self) -> tuple[int, int] | None:
        """`(lo, hi)` if the mask is one diagonal band whatever the length, else None."""
        return None

    def current(self) -> "Mask":
        """The mask as what its functions captured is now: the key under which plans are kept."""
        names = [f.name for f in dataclasses.fields(self)] if dataclasses.is_dataclass(self) else []
        inner = {name: getattr(self, name) for name in names if isinstance(getattr(self, name), Mask)}
        changed = {name: mask.current() for name, mask in inner.items()}
        if all(changed[name] is mask for name, mask in inner.items()):
            return self
        return dataclasses.replace(self, **changed)  # pyright: ignore[reportArgumentType]

    def __and__(self, other: "Mask") -> "Mask":
        return Both(self, _checked(other, "&"))

    def __or__(self, other: "Mask") -> "Mask":
        return Either(self, _checked(other, "|"))


def slices_of(mask: Mask, seq_len: int, *, row: int = 0, num_heads: int = 1) -> np.ndarray:
    """`mask.slices`, checked if a user wrote the mask."""
    found = mask.slices(seq_len, row=row, num_heads=num_heads)
    return check_slices(mask, found, (0, seq_len), seq_len) if is_user_written(mask) else found


def slices_between(
    mask: Mask, start: int, stop: int, kv_len: int, *, row: int = 0, num_heads: int = 1
) -> np.ndarray:
    """`mask.slices_between`, checked if a user wrote the mask."""
    found = mask.slices_between(start, stop, kv_len, row=row, num_heads=num_heads)
    return check_slices(mask, found, (start, stop), kv_len) if is_user_written(mask) else found


def _checked(other: object, operator: str) -> Mask:
    if not isinstance(other, Mask):
        raise LongmeshError(
            f"mask {operator} {type(other).__name__}: both sides must be masks; "
            "wrap a function in masks.mask_mod(fn)"
        )
    return other


def _joint_rows(left: Mask, right: Mask) -> int:
    rows = max(left.num_rows, right.num_rows)
    if {left.num_rows, right.num_rows} - {1, rows}:
        raise LongmeshError(
            f"masks of {left.num_rows} and of {right.num_rows} batch rows cannot be combined; "
            "give one list of lengths, or one for each of the same rows"
        )
    return rows


@dataclasses.dataclass(frozen=True)
class Pair(Mask):
    """Two masks, for the same batch rows or one of them for all."""

    left: Mask
    right: Mask

    def __post_init__(self) -> None:
        _joint_rows(self.left, self.right)

    @property
    def num_rows(self) -> int:
        return _joint_rows(self.left, self.right)

    @property
    def numbers_queries(self) -> Literal["", "all", "both"]:
        left, right = self.left.numbers_queries, self.right.numbers_queries
        if left == right:
            return left
        if self.left.band() == (-UNBOUNDED, UNBOUNDED):  # what shows everything has no say
            return right
        return left if self.right.band() == (-UNBOUNDED, UNBOUNDED) else "both"

    @staticmethod
    @abc.abstractmethod
    def join(left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """The slices of both sides as those of the pair."""

    def slices(self, seq_len: int, *, row: int = 0, num_heads: int = 1) -> np.ndarray:
        sides = (self.left, self.right)
        return self.join(
            *(slices_of(side, seq_len, row=row % side.num_rows, num_heads=num_heads) for side in sides)
        )

    def slices_between(
        self, start: int, stop: int, kv_len: int, *, row: int = 0, num_heads: int = 1
    ) -> np.ndarray:
        return self.join(
            *(
                slices_between(side, start, stop, kv_len, row=row % side.num_rows, num_heads=num_heads)
                for side in (self.left, self.right)
            )
        )


@dataclasses.dataclass(frozen=True)
class Both(Pair):
    """`left & right`: visible where both are."""

    join = staticmethod(intersect)

    def band(self) -> tuple[int, int] | None:
        a, b = self.left.band(), self.right.band()
        return (max(a[0], b[0]), min(a[1], b[1])) if a and b else None

    def visible(self, b, h, q_idx, kv_idx) -> Any:
        return self.left.visible(b, h, q_idx, kv_idx) & self.right.visible(b, h, q_idx, kv_idx)

    def __str__(self) -> str:
        return f"({self.left} & {self.right})"


@dataclasses.dataclass(frozen=True)
class Either(Pair):
    """`left | right`: visible where one is; a pair in both is counted once."""

    join = staticmethod(union)

    def visible(self, b, h, q_idx, kv_idx) -> Any:
        return self.left.visible(b, h, q_idx, kv_idx) | self.right.visible(b, h, q_idx, kv_idx)

    def __str__(self) -> str:
        return f"({self.left} | {self.right})"
