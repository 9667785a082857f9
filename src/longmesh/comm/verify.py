"""Checks that need the other ranks' word: do all ranks hold what the layout says?

Collective: each function is entered by every rank of the mesh, and each rank comes to the same
answer, so an error is raised by all of them or by none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from longmesh.comm import collectives
from longmesh.comm.groups import AxisGroup, MeshComm
from longmesh.errors import LongmeshError
from longmesh.spec import Layout, Replicate

_MAX_DIMS = 16


def gather_rows(
    values: Sequence[int], comm: MeshComm, device: torch.device
) -> tuple[AxisGroup, list[list[int]]]:
    """Every rank's short list of numbers, in the order of the whole mesh's group."""
    group = comm.group(tuple(range(comm.shape.ndim)))
    row = torch.tensor([len(values), *values, *[0] * (_MAX_DIMS - len(values))], device=device)
    rows = collectives.all_gather(row, group=group).view(group.size, -1).tolist()
    return group, [row[1 : 1 + row[0]] for row in rows]


def sum_over(numbers: list[int], comm: MeshComm, device: str) -> list[int]:
    """Each number added up over the ranks of the mesh. Collective."""
    group = comm.group(tuple(range(comm.shape.ndim)))
    if group.size == 1 or not numbers:
        return numbers
    mine = torch.tensor(numbers, device=group.device_of_words(device))
    return collectives.all_reduce(mine, reduce_op="sum", group=group).tolist()


def verify_local_shapes(
    local: torch.Tensor, layout: Layout, shape: Sequence[int], comm: MeshComm, *, given: bool
) -> None:
    """Raise on every rank if some rank's shard is not what `layout` makes of the global `shape`."""
    group, shapes = gather_rows(local.shape, comm, local.device)
    if not given and shapes.count(shapes[0]) != len(shapes):
        raise LongmeshError(
            f"from_local(run_check=True): the ranks hold shards of different sizes {shapes} and without shape= "
            f"they are taken to be equal; pass the global shape="
        )
    for coordinate, have in zip(group.members, shapes, strict=True):
        want = list(layout.local_shape(shape, coordinate)) if len(have) == len(shape) else None
        if have != want:
            raise LongmeshError(
                f"from_local(run_check=True): shape={tuple(shape)} laid out as {layout} on {layout.mesh} gives "
                f"coordinate {coordinate} a shard of {f'{len(shape)} dims' if want is None else tuple(want)}, but it "
                f"holds {tuple(have)}; pass the shards that chunking gives, or the right global shape"
            )


def broadcast_replicas(local: torch.Tensor, layout: Layout, comm: MeshComm) -> torch.Tensor:
    """Replace replicas by the data of their axis's first rank."""
    for axis, placement in enumerate(layout.placements):
        if isinstance(placement, Replicate) and comm.shape.sizes[axis] > 1:
            group = comm.group((axis,))
            source = comm.global_rank((*comm.coordinate[:axis], 0, *comm.coordinate[axis + 1 :]))
            with torch.no_grad():
                fresh = local.detach().clone(memory_format=torch.contiguous_format)
                dist.broadcast(fresh, src=source, group=group.process_group)
                local = local.detach().copy_(fresh) if not local.requires_grad else _replace(local, fresh)
    return local


def _replace(local: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        local.copy_(fresh)
    return local
