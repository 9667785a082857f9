"""Hand one rank's whole tensor out to a mesh, with bounded memory.

Sharded axes come first, so what travels shrinks as it goes: along each of them the ranks that have
the data send every other rank of the axis its piece, one piece in memory at a time. Then
replicated axes broadcast what is left.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from longmesh.comm.collectives import note
from longmesh.comm.groups import MeshComm
from longmesh.comm.lost import reporting
from longmesh.spec import Coordinate, Layout, Shard


def scatter_tensor(tensor: torch.Tensor, layout: Layout, comm: MeshComm, *, source: int) -> torch.Tensor:
    """This rank's shard of the tensor that the rank at coordinate (source, source, ...) holds.

    Collective over the mesh. `layout` has no Partial; on every rank `tensor` has the global shape.
    """
    shape = tuple(tensor.shape)
    order = sharding_order(layout)
    rest = [a for a in range(layout.mesh.ndim) if a not in order]
    local = tensor.detach()
    reached = Layout.replicated(layout.mesh)
    waiting = [*order, *rest]
    for axis in order:
        waiting.remove(axis)
        after = reached.with_placement(axis, layout.placements[axis])
        if all(comm.coordinate[a] == source for a in waiting):
            local = _scatter_axis(local, reached, after, shape, axis, comm, source)
        reached = after
    for axis in rest:
        waiting.remove(axis)
        if comm.shape.sizes[axis] > 1 and all(comm.coordinate[a] == source for a in waiting):
            local = _broadcast_axis(local, reached, shape, axis, comm, source)
    return (
        local.clone(memory_format=torch.contiguous_format) if local.data_ptr() == tensor.data_ptr() else local
    )


def sharding_order(layout: Layout) -> list[int]:
    """The sharding axes, each after those that shard its dim before it."""
    return [axis for _, axes in layout.shard_order for axis in axes]


def _scatter_axis(
    local: torch.Tensor,
    before: Layout,
    after: Layout,
    shape: tuple[int, ...],
    axis: int,
    comm: MeshComm,
    source: int,
) -> torch.Tensor:
    group = comm.group((axis,))
    placement = after.placements[axis]
    assert isinstance(placement, Shard)
    dim = placement.dim

    def interval(coordinate: Coordinate) -> tuple[int, int]:
        outer, _ = before.interval(dim, shape[dim], coordinate)
        start, length = after.interval(dim, shape[dim], coordinate)
        assert isinstance(start, int) and isinstance(outer, int) and isinstance(length, int)
        return start - outer, length

    mine = interval(comm.coordinate)
    if comm.coordinate[axis] == source:
        for coordinate, rank in zip(group.members, group.global_ranks, strict=True):
            if coordinate != comm.coordinate:
                piece = local.narrow(dim, *interval(coordinate)).contiguous()
                note("send", piece, piece.numel(), group)
                if piece.numel():
                    with reporting("send", piece, group):
                        dist.send(piece, dst=rank, group=group.process_group)
        return local.narrow(dim, *mine).clone(memory_format=torch.contiguous_format)
    piece = local.new_empty(after.local_shape(shape, comm.coordinate))
    if piece.numel():
        origin = comm.global_rank((*comm.coordinate[:axis], source, *comm.coordinate[axis + 1 :]))
        with reporting("recv", piece, group):
            dist.recv(piece, src=origin, group=group.process_group)
    return piece


def _broadcast_axis(
    local: torch.Tensor, layout: Layout, shape: tuple[int, ...], axis: int, comm: MeshComm, source: int
) -> torch.Tensor:
    group = comm.group((axis,))
    is_source = comm.coordinate[axis] == source
    local = local.contiguous() if is_source else local.new_empty(layout.local_shape(shape, comm.coordinate))
    note("broadcast", local, local.numel() * (group.size - 1) if is_source else 0, group)
    if local.numel():
        origin = comm.global_rank((*comm.coordinate[:axis], source, *comm.coordinate[axis + 1 :]))
        with reporting("broadcast", local, group):
            dist.broadcast(local, src=origin, group=group.process_group)
    return local
