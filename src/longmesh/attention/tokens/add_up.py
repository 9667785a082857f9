"""Sums over all ranks that come before errors: a rank that can't go on takes part, and the others learn of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from longmesh._torch import is_tracing
from longmesh.comm import AxisGroup, MeshComm, collectives, kept_by_mesh
from longmesh.comm.agree import checks_every_call
from longmesh.comm.traced import traced_collectives
from longmesh.errors import LongmeshError


def add_up(what: str, numbers: Sequence[Tensor], problem: Exception | None, comm: MeshComm) -> Tensor:
    """Each number (a tensor without dims) summed over all ranks of the mesh: (numbers,), in float64, without gradient.

    Collective. If some rank has a `problem`, that rank raises it, and the others raise an error that speaks of `what`.
    """
    wrong = numbers[0].new_full((), problem is not None, dtype=torch.float64)
    sums = torch.stack([*(n.detach().double() for n in numbers), wrong])
    num_wrong, size = 0, comm.shape.size()
    if size > 1:
        group = comm.group(tuple(range(comm.shape.ndim)))
        if torch.compiler.is_compiling():
            return traced_collectives.all_reduce(sums, "sum", group.name)[:-1]
        sums = collectives.all_reduce(sums, reduce_op="sum", group=group)
        num_wrong = _num_wrong(problem, sums[-1], group) if _is_asked(comm) and not is_tracing() else 0
    if problem is not None:
        raise problem
    if num_wrong:
        raise LongmeshError(
            f"{what}: {num_wrong} of the {size} ranks got invalid arguments and report them; this rank's "
            "arguments are valid"
        )
    return sums[:-1]


def _num_wrong(problem: Exception | None, counted: Tensor, group: AxisGroup) -> int:
    """How many ranks have a problem. Collective: between CPUs, if they can, so that no host waits for its device."""
    if counted.device.type == "cpu" or not group.takes_cpu:
        return int(counted)
    return int(collectives.all_reduce(torch.tensor([int(problem is not None)]), reduce_op="sum", group=group))


def _is_asked(comm: MeshComm) -> bool:
    """Whether this rank looks if others can go on: on a device it would wait for it, so at the first call only, as
    attention does. Later a rank that raises is ended with the others by the launcher."""
    return next(_calls(comm)) == 0 or comm.mesh.device_type == "cpu" or checks_every_call()


@kept_by_mesh(1)
def _calls(comm: MeshComm) -> Iterator[int]:
    return itertools.count()
