"""Who this process is on a pool's mesh. A rank outside the mesh keeps the books as the others do, and no keys."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from longmesh.comm import AxisGroup, comm_anywhere
from longmesh.errors import LongmeshError


class Member:
    """This process's place in a mesh with one axis; without a mesh it is alone. `rank` is -1 outside the mesh."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        if mesh is not None and mesh.ndim != 1:
            raise LongmeshError(
                f"PagePool: the mesh has {mesh.ndim} axes; a cache uses one: pass the sub-mesh, such as mesh['cp']"
            )
        self.mesh = mesh
        self.group: AxisGroup | None = None
        self.rank, self.global_ranks, self.is_member = 0, (0,), True
        if mesh is not None:
            comm = comm_anywhere(mesh)
            group = comm.group((0,))
            self.is_member = comm.is_member
            # As torch has them in its group, where they are sorted.
            self.global_ranks = group.global_ranks if comm.is_member else tuple(sorted(group.global_ranks))
            self.group, self.rank = (group, group.rank) if comm.is_member else (None, -1)

    @property
    def size(self) -> int:
        return len(self.global_ranks)

    def check(self, what: str) -> None:
        """Raise on a rank that is not in the mesh."""
        if not self.is_member:
            raise LongmeshError(
                f"{what}: this rank is not in the pool's mesh, of ranks {list(self.global_ranks)}: it tracks the "
                "pages and holds no keys; call this on the mesh's ranks only"
            )
