"""Global metadata from local metadata: shapes and strides of the whole from one rank's part."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from longmesh.errors import LongmeshError
from longmesh.spec import Layout, Partial


def even_global_shape(layout: Layout, local_shape: Sequence[int]) -> tuple[int, ...]:
    """The global shape if every rank's shard is as large as this one."""
    sizes = layout.mesh.sizes
    shape = list(local_shape)
    for dim, axes in layout.shard_order:
        for axis in axes:
            shape[dim] *= sizes[axis]
    return tuple(shape)


def joined_shape(
    shapes: dict[tuple[int, ...], list[int]], layout: Layout, what: str, remedy: str
) -> tuple[int, ...]:
    """The global shape that the parts of all coordinates make up together. Raises on all ranks or on none."""
    if len({len(part) for part in shapes.values()}) > 1:
        raise LongmeshError(
            f"{what}: the ranks' parts differ in their number of dims: {list(shapes.values())}"
        )
    shape = list(shapes[(0,) * layout.mesh.ndim])
    for dim, axes in layout.shard_order:
        others = [c for c in shapes if not any(place for a, place in enumerate(c) if a not in axes)]
        shape[dim] = sum(shapes[c][dim] for c in others)
    for coordinate, have in shapes.items():
        want = list(layout.local_shape(shape, coordinate))
        if have != want:
            raise LongmeshError(
                f"{what} laid out as {layout} on {layout.mesh} would have the shape {tuple(shape)}, of which "
                f"coordinate {coordinate} holds {tuple(want)}, but its part is {tuple(have)}; {remedy}"
            )
    return tuple(shape)


def check_averages(layout: Layout, dtype: torch.dtype) -> None:
    """A pending average needs numbers that can be divided."""
    if Partial("avg") in layout.placements and not (dtype.is_floating_point or dtype.is_complex):
        raise LongmeshError(
            f"Partial(avg) of {dtype}: an average of integers is not an integer; use Partial(sum), or a float tensor"
        )
