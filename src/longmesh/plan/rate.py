"""Rates of one rank: how fast it multiplies matrices, or attends, by dtype and size of tile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from longmesh.errors import LongmeshError

Array = NDArray[np.float64]
RateOp = Literal["matmul", "attention", "attention_backward"]
RATE_OPS: tuple[RateOp, ...] = ("matmul", "attention", "attention_backward")
TileKind = Literal["full", "causal", "window"]
TILE_KINDS: tuple[TileKind, ...] = ("full", "causal", "window")


@dataclass(frozen=True, slots=True)
class Rate:
    """Floating point operations per microsecond of one rank, on tiles of `tile` rows and `keys` keys (None: as many).

    `kind` says which pairs of an attention tile are visible: all, a causal triangle, or a window of `tile` keys. Only
    visible pairs count: 4 * head_dim operations each in each head, forward, and 10 * head_dim backward. `fixed_us` is
    what a tile takes besides, however many heads it has.

    >>> Rate("attention", "float32", tile=512, flops_per_us=40_000.0, kind="causal").tile
    512
    """

    op: RateOp
    dtype: str
    tile: int
    flops_per_us: float
    kind: TileKind = "full"
    keys: int | None = None
    fixed_us: float = 0.0

    def __post_init__(self) -> None:
        if self.op not in RATE_OPS or self.kind not in TILE_KINDS:
            raise LongmeshError(
                f"Rate(op={self.op!r}, kind={self.kind!r}): op is one of {', '.join(RATE_OPS)}, "
                f"kind one of {', '.join(TILE_KINDS)}"
            )
        sizes = self.tile >= 1 and (self.keys or 1) >= 1
        if not (sizes and self.flops_per_us > 0 and self.fixed_us >= 0):
            raise LongmeshError(
                f"{self}: tile and keys must be at least 1, the rate more than 0, fixed_us at least 0"
            )


def choose_rates(rates: Sequence[Rate], op: RateOp, dtype: str, kind: TileKind) -> list[Rate]:
    """Those of an op, a dtype and a kind, or of the first that has some."""
    found = [rate for rate in rates if rate.op == op] or list(rates)
    found = [rate for rate in found if rate.dtype == dtype] or _like_first(found, "dtype")
    return [rate for rate in found if rate.kind == kind] or _like_first(found, "kind")


def _like_first(rates: list[Rate], field: str) -> list[Rate]:
    return [rate for rate in rates if getattr(rate, field) == getattr(rates[0], field)]


class RateTable:
    """Rates and fixed times of one kind of tiles, by rows and keys: of a grid where every pair of sizes has one, else
    by the shorter side of those that are square. Between the sizes their logarithms are interpolated."""

    def __init__(self, rates: Sequence[Rate]) -> None:
        found = {(rate.tile, rate.keys or rate.tile): rate for rate in rates}
        rows, keys = (sorted({size[side] for size in found}) for side in (0, 1))
        self._is_grid = len(found) == len(rows) * len(keys)
        if not self._is_grid:
            square = {size: rate for size, rate in found.items() if size[0] == size[1]} or found
            found = {(size[0], 1): rate for size, rate in square.items()}
            rows, keys = sorted({size[0] for size in found}), [1]
        self._rows: Array = np.log2(rows)
        self._keys: Array = np.log2(keys)
        grid = [[found[row, key] for key in keys] for row in rows]
        self._rates: list[Array] = [np.log2([rate.flops_per_us for rate in line]) for line in grid]
        self._fixed: list[Array] = [np.array([rate.fixed_us for rate in line]) for line in grid]
        self.has_fixed: bool = any(rate.fixed_us for rate in rates)

    def flops_per_us(self, rows: NDArray[Any] | float, keys: NDArray[Any] | float) -> Array:
        """Sizes beyond the table have the rate at its edge."""
        return 2.0 ** self._between(self._rates, rows, keys)

    def fixed_us(self, rows: NDArray[Any] | float, keys: NDArray[Any] | float) -> Array:
        """The same of fixed times."""
        return self._between(self._fixed, rows, keys)

    def _between(
        self, table: Sequence[Array], rows: NDArray[Any] | float, keys: NDArray[Any] | float
    ) -> Array:
        if not self._is_grid:
            rows = np.minimum(rows, keys)
        y, x = (np.log2(np.maximum(size, 1)) for size in (rows, keys))
        place: Any = np.interp(y, self._rows, np.arange(len(self._rows)))
        found: Any = 0.0
        for number, line in enumerate(table):  # each row of the table weighs as near as it is
            found = found + np.maximum(0.0, 1 - np.abs(place - number)) * np.interp(x, self._keys, line)
        return found
