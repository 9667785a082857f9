"""Boxes: the part of a tensor each rank holds, for all ranks at once.

A rank's shard is one interval per tensor dim, whatever the shard order. The arrays here have one
dim per mesh axis (size 1 where the value does not depend on that axis), so volumes and overlaps
of thousands of ranks are a few numpy operations. numpy, not torch: planning happens inside torch's
dispatch and fake-tensor modes, which would catch torch ops.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from longmesh.spec import Layout

Array: TypeAlias = NDArray[np.int64]
Shape: TypeAlias = tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def _interval(size: int, axes: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[Array, Array]:
    """Start and stop along one dim, over the mesh."""
    start: Any = np.zeros((1,) * len(sizes), np.int64)
    length: Any = start + size
    for axis in axes:
        parts = sizes[axis]
        index: Any = np.arange(parts).reshape([parts if a == axis else 1 for a in range(len(sizes))])  # pyright: ignore[reportUnknownMemberType]
        chunk = -(-length // parts)
        begin = np.minimum(index * chunk, length)
        start = start + begin
        length = np.minimum(chunk, length - begin)
    return start, start + length


def volumes(layout: Layout, shape: Shape) -> Array:
    """How many elements each rank holds."""
    total: Any = np.ones((1,) * layout.mesh.ndim, np.int64)
    for dim, size in enumerate(shape):
        axes = layout.shard_axes(dim)
        if axes:
            start, stop = _interval(size, axes, layout.mesh.sizes)
            total = total * (stop - start)
        else:
            total = total * size
    return total


def overlaps(src: Layout, dst: Layout, shape: Shape) -> Array:
    """How many of the elements it holds under `dst` each rank already holds under `src`."""
    total: Any = np.ones((1,) * src.mesh.ndim, np.int64)
    sizes = src.mesh.sizes
    for dim, size in enumerate(shape):
        src_axes, dst_axes = src.shard_axes(dim), dst.shard_axes(dim)
        if not src_axes and not dst_axes:
            total = total * size
            continue
        src_start, src_stop = _interval(size, src_axes, sizes)
        if src_axes == dst_axes:
            total = total * (src_stop - src_start)
            continue
        dst_start, dst_stop = _interval(size, dst_axes, sizes)
        common = np.minimum(src_stop, dst_stop) - np.maximum(src_start, dst_start)
        total = total * np.maximum(common, 0)
    return total


def total_over_ranks(values: Array, sizes: Sequence[int]) -> int:
    """The sum over all ranks of an array whose size-1 dims stand for every index of their axis."""
    repeats = 1
    for have, size in zip(values.shape, sizes, strict=True):
        repeats *= size // have
    return int(values.sum()) * repeats
