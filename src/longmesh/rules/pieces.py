"""What a plan needs to work along a sharded dim: who holds which piece, and what becomes of layouts and shapes.

Which pieces are empty follows from the layout, so every rank knows it of every other: their results are
dropped after the gather, never before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from longmesh.spec import Layout, Placement, Shard


def as_dims(given: Any, ndim: int) -> tuple[int, ...]:
    """Dims from 0 on, sorted; None or an empty list means all. Raises as torch does."""
    if given is None or given in ([], ()):
        return tuple(range(ndim))
    dims: tuple[int, ...] = (given,) if isinstance(given, int) else tuple(given)
    span = max(ndim, 1)
    for dim in dims:
        if not -span <= dim < span:
            raise IndexError(
                f"Dimension out of range (expected to be in range of [{-span}, {span - 1}], but got {dim})"
            )
    result = tuple(sorted(d % span for d in dims))
    if len(frozenset(result)) < len(result):
        raise RuntimeError(f"a dim appears multiple times in the list of dims {list(dims)}")
    return tuple(d for d in result if d < ndim)


def sharding_axes(layout: Layout, dims: Sequence[int]) -> tuple[int, ...]:
    """The mesh axes that shard any of `dims`, sorted."""
    return tuple(sorted(axis for dim in dims for axis in layout.shard_axes(dim)))


def without_pending(layout: Layout) -> Layout:
    """The layout once pending reductions are carried out: replicated there."""
    return layout.with_replicated(layout.partial_axes)


_HALVES = (torch.float16, torch.bfloat16)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a type is computed in: half precision in float32, as in torch's kernels."""
    return torch.float32 if dtype in _HALVES else dtype


def reduced_layout(layout: Layout, dims: Sequence[int], keepdim: bool, pending: Placement) -> Layout:
    """The layout after a reduction of `dims`: their axes get `pending`, the others keep their dims."""
    gone = () if keepdim else dims
    placements = list(layout.placements)
    order: list[tuple[int, Sequence[int]]] = []
    for dim, axes in layout.shard_order:
        if dim in dims:
            for axis in axes:
                placements[axis] = pending
        else:
            moved = dim - sum(d < dim for d in gone)
            order.append((moved, axes))
            for axis in axes:
                placements[axis] = Shard(moved)
    return Layout(layout.mesh, placements, order)


def reduced_shape(shape: Sequence[int], dims: Sequence[int], keepdim: bool) -> tuple[int, ...]:
    return tuple(1 if d in dims else n for d, n in enumerate(shape) if keepdim or d not in dims)


def stand_in(local: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """`local`, or zeros with one element along `dims` where it has none: ops then raise alike on all ranks."""
    if all(local.shape[d] for d in dims):
        return local
    return local.new_zeros([1 if d in dims else n for d, n in enumerate(local.shape)])
