"""What holds on all ranks of a sequence: one rank's tokens may not be enough to tell."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from longmesh.comm import collectives, comm_of


def true_everywhere(flags: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Which of these, (flags,), are true on all ranks of the mesh. Collective."""
    if mesh is None:
        return flags.bool()
    group = comm_of(mesh).group(tuple(range(mesh.ndim)))
    found = collectives.all_gather(flags.long()[None], group=group) if group.size > 1 else flags[None]
    return found.min(0).values > 0
