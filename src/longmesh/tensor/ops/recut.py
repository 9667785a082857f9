"""A cut dim gets another size: pieces at new places, then chunking again, in one exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from longmesh.comm import comm_of
from longmesh.comm.intervals import Interval, Pieces, exchange_intervals
from longmesh.spec import Coordinate, Layout
from longmesh.tensor.dtensor import DTensor
from longmesh.tensor.meta import global_stride


def recut(
    pieces: Sequence[torch.Tensor],
    mesh: DeviceMesh,
    layout: Layout,
    shape: Sequence[int],
    dim: int,
    pieces_of: Callable[[Coordinate], Pieces],
    *,
    fill: float | int | bool | complex = 0,
) -> DTensor:
    """The DTensor of `shape` laid out as `layout` whose dim `dim`, cut by some axes, is made of all ranks' `pieces`.

    `pieces_of(coordinate)` tells where a rank's pieces lie along `dim`; the other dims are cut as `layout` says
    already. Collective.
    """
    comm = comm_of(mesh)
    group = comm.group(tuple(sorted(layout.cuts(dim))))
    local = exchange_intervals(
        pieces,
        have=tuple(pieces_of(member) for member in group.members),
        want=tuple(interval(layout, dim, shape[dim], member) for member in group.members),
        dim=dim,
        group=group,
        fill=fill,
    )
    return DTensor(local, mesh, layout, tuple(shape), global_stride(shape, local))


def interval(layout: Layout, dim: int, size: int, coordinate: Coordinate) -> Interval:
    """Start and length of what a rank holds of a dim, as plain numbers."""
    start, length = layout.interval(dim, size, coordinate)
    return int(start), int(length)
