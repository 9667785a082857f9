"""What all ranks of a sequence must agree on: the batch, or each would cut another one; and what one rank's tokens
may not be enough to tell.

Batches are compared at the first scope of a mesh, and at every one on CPUs: elsewhere a comparison may wait for the
device.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from longmesh.comm import MeshComm, collectives, comm_of, kept_by_mesh
from longmesh.comm.agree import checks_every_call
from longmesh.errors import LongmeshError


def refuse_different(mesh: DeviceMesh, batch: Mapping[str, Any]) -> None:
    """Raise on every rank of the mesh if they hold different batches. Collective."""
    if mesh.size() == 1 or not _is_asked(mesh):
        return
    group = comm_of(mesh).group(tuple(range(mesh.ndim)))
    number, size = _digest(batch)
    ends = torch.tensor((number, -number, size, -size), dtype=torch.float64)
    ends = ends.to(group.device_of_words(mesh.device_type))
    high, low, largest, smallest = collectives.all_reduce(ends, reduce_op="max", group=group).tolist()
    if high != -low or not math.isclose(largest, -smallest, rel_tol=1e-3):
        raise LongmeshError(
            "the ranks of one sequence got different batches; a sampler or collator that draws random numbers must be "
            "seeded alike on all ranks of 'cp', with a generator of its own"
        )


def _is_asked(mesh: DeviceMesh) -> bool:
    before = _scopes(comm_of(mesh))
    return next(before) == 0 or mesh.device_type == "cpu" or checks_every_call()


@kept_by_mesh(1)
def _scopes(comm: MeshComm) -> Iterator[int]:
    return itertools.count()


def _digest(batch: Mapping[str, Any]) -> tuple[int, float]:
    """A number made of names, shapes and integers, and the size of floats, which ranks may round differently."""
    number, size = 0, 0.0
    for name, value in sorted(batch.items()):
        if not isinstance(value, Tensor):
            continue
        number = zlib.crc32(f"{name} {tuple(value.shape)} {number}".encode())
        flat = value.detach().flatten()
        if value.is_floating_point():
            size += float(flat.nan_to_num().abs().sum(dtype=torch.float64))
        else:
            weights = torch.arange(1, len(flat) + 1, device=flat.device) % 8191 + 1
            number = zlib.crc32(f"{number} {int((flat.long() * weights).sum())}".encode())
    return number, size


def true_everywhere(flags: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Which of these, (flags,), are true on all ranks of the mesh. Collective."""
    if mesh is None:
        return flags.bool()
    group = comm_of(mesh).group(tuple(range(mesh.ndim)))
    found = collectives.all_gather(flags.long()[None], group=group) if group.size > 1 else flags[None]
    return found.min(0).values > 0
