"""The rows around the borders of sharded spatial dims, for ops that slide a window over them: convolutions and pools.

rows of the output of this rank  ->  rows of the input they need (`rules/window.py`)
one all_to_all per sharded dim brings those that others have (`comm/halo.py`); the backward sends their gradients home
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from longmesh.comm.groups import AxisGroup, MeshComm
from longmesh.comm.halo import Rows
from longmesh.rules.window import Slide, Window
from longmesh.spec import Layout
from longmesh.tensor.planned import Part
from longmesh.tensor.planner import Planner


@dataclass(frozen=True, slots=True)
class Border:
    """One sharded spatial dim: who has and needs which rows of the input, and our padding."""

    dim: int
    group: AxisGroup
    have: tuple[Rows, ...]
    need: tuple[Rows, ...]
    window: Window

    def padding(self, ndim: int, sign: int = 1) -> list[int]:
        """For torch.nn.functional.pad."""
        amounts = [0] * (2 * ndim)
        amounts[2 * (ndim - 1 - self.dim)] = sign * self.window.before
        amounts[2 * (ndim - 1 - self.dim) + 1] = sign * self.window.after
        return amounts

    @property
    def num_needed(self) -> int:
        low, high = self.need[self.group.rank]
        return high - low


def borders_of(
    slides: Mapping[int, Slide], layout: Layout, out: Layout, out_shape: Sequence[int], comm: MeshComm
) -> list[Border]:
    """The sharded ones of the dims that windows slide over, for an input laid out as `layout`, outputs as `out`."""
    borders: list[Border] = []
    for dim, slide in slides.items():
        if not layout.shard_axes(dim):
            continue
        group = comm.group(tuple(sorted(layout.shard_axes(dim))))
        have = tuple(_rows(layout, dim, slide.size, c) for c in group.members)
        windows = [slide.window(*_rows(out, dim, out_shape[dim], c)) for c in group.members]
        borders.append(Border(dim, group, have, tuple(w.rows for w in windows), windows[group.rank]))
    return borders


def _rows(layout: Layout, dim: int, size: int, coordinate: tuple[int, ...]) -> Rows:
    start, length = layout.interval(dim, size, coordinate)
    return int(start), int(start) + int(length)


def fetched_shape(shape: Sequence[int], borders: Sequence[Border]) -> list[int]:
    """The shape of a rank's part of `shape` with the rows that its windows need."""
    sizes = {border.dim: border.num_needed for border in borders}
    return [sizes.get(d, n) for d, n in enumerate(shape)]


def fetch(p: Planner, part: Any, shape: Sequence[int], dtype: torch.dtype, borders: Sequence[Border]) -> Any:
    """The rows that this rank's windows need; it has a part of `shape`."""
    for number, border in enumerate(borders):
        now = fetched_shape(shape, borders[:number])
        part = p.halo(
            part, border.dim, border.have, border.need, border.group, _row_bytes(now, border.dim, dtype)
        )
    return part


def send_home(
    p: Planner, part: Any, shape: Sequence[int], dtype: torch.dtype, borders: Sequence[Border]
) -> Part:
    """Gradients of fetched rows, added up where the rows are."""
    for number, border in reversed(list(enumerate(borders))):
        now = fetched_shape(shape, borders[: number + 1])
        row = _row_bytes(now, border.dim, dtype)
        part = p.halo(part, border.dim, border.have, border.need, border.group, row, home=True)
    return part


def _row_bytes(shape: Sequence[int], dim: int, dtype: torch.dtype) -> int:
    return math.prod(n for d, n in enumerate(shape) if d != dim) * dtype.itemsize


def padded(
    tensor: torch.Tensor, borders: Sequence[Border], sign: int = 1, value: float = 0.0
) -> torch.Tensor:
    """Fetched rows with the padding around them, or without it where `sign` is negative."""
    for border in borders:
        amounts = border.padding(tensor.ndim, sign)
        if any(amounts):
            tensor = pad(tensor, amounts, value=value)
    return tensor
