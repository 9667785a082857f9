"""The rows around the borders of sharded spatial dims, for ops that slide a window over them: convolutions and pools.

rows of the output of this rank  ->  rows of the input they need (`rules/window.py`)
one all_to_all per sharded dim brings those that others have; the backward sends their gradients home
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from longmesh.rules.planned import Part
from longmesh.rules.steps import Rows
from longmesh.rules.window import Slide, Window
from longmesh.rules.writer import Writer
from longmesh.spec import Coordinate, Layout

Pads = tuple[tuple[int, int, int], ...]
"""Dims, and the rows to put before and after what was fetched along them."""


@dataclass(frozen=True, slots=True)
class Border:
    """One sharded spatial dim: who has and needs which rows of the input, and this rank's window."""

    dim: int
    axes: tuple[int, ...]
    have: tuple[Rows, ...]
    need: tuple[Rows, ...]
    window: Window


def borders_of(
    slides: Mapping[int, Slide], layout: Layout, out: Layout, out_shape: Sequence[int], where: Coordinate
) -> list[Border]:
    """The sharded ones of the dims that windows slide over, for an input laid out as `layout`, outputs as `out`."""
    borders: list[Border] = []
    for dim, slide in slides.items():
        if not layout.shard_axes(dim):
            continue
        axes = tuple(sorted(layout.shard_axes(dim)))
        members = layout.mesh.members(axes, where)
        have = tuple(_rows(layout, dim, slide.size, c) for c in members)
        windows = [slide.window(*_rows(out, dim, out_shape[dim], c)) for c in members]
        need = tuple(w.rows for w in windows)
        borders.append(Border(dim, axes, have, need, windows[members.index(where)]))
    return borders


def _rows(layout: Layout, dim: int, size: int, coordinate: Coordinate) -> Rows:
    start, length = layout.interval(dim, size, coordinate)
    return int(start), int(start) + int(length)


def fetched_shape(shape: Sequence[int], borders: Sequence[Border]) -> list[int]:
    """The shape of a rank's part of `shape` with the rows that its windows need."""
    sizes = {border.dim: border.window.rows[1] - border.window.rows[0] for border in borders}
    return [sizes.get(d, n) for d, n in enumerate(shape)]


def fetch(p: Writer, part: Any, shape: Sequence[int], dtype: torch.dtype, borders: Sequence[Border]) -> Any:
    """The rows that this rank's windows need; it has a part of `shape`."""
    for number, b in enumerate(borders):
        row = _row_bytes(fetched_shape(shape, borders[:number]), b.dim, dtype)
        part = p.halo(part, b.dim, b.have, b.need, b.axes, row)
    return part


def send_home(
    p: Writer, part: Any, shape: Sequence[int], dtype: torch.dtype, borders: Sequence[Border]
) -> Part:
    """Gradients of fetched rows, added up where the rows are."""
    for number, b in reversed(list(enumerate(borders))):
        row = _row_bytes(fetched_shape(shape, borders[: number + 1]), b.dim, dtype)
        part = p.halo(part, b.dim, b.have, b.need, b.axes, row, home=True)
    return part


def _row_bytes(shape: Sequence[int], dim: int, dtype: torch.dtype) -> int:
    return math.prod(n for d, n in enumerate(shape) if d != dim) * dtype.itemsize


def pads_of(borders: Sequence[Border]) -> Pads:
    """The padding around the rows that are fetched."""
    return tuple((b.dim, b.window.before, b.window.after) for b in borders)


def padded(tensor: torch.Tensor, pads: Pads, sign: int = 1, value: float = 0.0) -> torch.Tensor:
    """Fetched rows with the padding around them, or without it where `sign` is negative."""
    for dim, before, after in pads:
        if before or after:
            amounts = [0] * (2 * tensor.ndim)
            amounts[2 * (tensor.ndim - 1 - dim)] = sign * before
            amounts[2 * (tensor.ndim - 1 - dim) + 1] = sign * after
            tensor = pad(tensor, amounts, value=value)
    return tensor
