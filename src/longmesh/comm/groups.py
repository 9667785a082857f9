"""Process groups for one or several mesh axes, and who stands where in them.

torch sorts the ranks of a new group, so a member's place in its group need not follow the mesh's
coordinates; `AxisGroup.members` lists coordinates in the group's own order.

Collective: a group over several axes is made the first time it is needed, by all its ranks
together. Plans are the same on every rank, so they all need it at the same moment.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from longmesh._torch import no_dispatch_modes
from longmesh._torch.process_groups import new_group, root_of
from longmesh.comm.record import tell_new_group
from longmesh.errors import NotDistributedError
from longmesh.plan import Cluster, cluster_of
from longmesh.spec import Coordinate, MeshShape


@dataclass(frozen=True, slots=True)
class AxisGroup:
    """The ranks that differ from ours only on `axes`, in the order torch's group has them."""

    process_group: dist.ProcessGroup
    name: str
    axes: tuple[str, ...]
    members: tuple[Coordinate, ...]
    global_ranks: tuple[int, ...]
    rank: int
    is_gloo: bool
    takes_cpu: bool = False  # a backend for CPU tensors is there, maybe beside a device's

    @property
    def size(self) -> int:
        return len(self.members)

    def device_of_words(self, device: str) -> str:
        """Where a few numbers that the host will read are sent from: the CPU if it can be, else `device`, which the
        host then waits for."""
        return "cpu" if self.takes_cpu else device


class Place(NamedTuple):
    """A rank of a mesh, and the cluster that plans are made for: all that a plan depends on of a process."""

    mesh: MeshShape
    coordinate: Coordinate
    cluster: Cluster


class _Nobody:
    """In the place of a process group on a rank that is not in it."""


class MeshComm:
    """What this process needs to communicate on one DeviceMesh: its coordinate and its groups.

    On a rank that is not in the mesh `is_member` is False, and coordinate and groups are those of the mesh's first
    rank: what is planned with them is what the mesh's ranks plan, and nothing can be sent.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        if not dist.is_initialized():
            raise NotDistributedError(
                "no process group: start this script with `longmesh run --ranks N script.py` or torchrun, "
                "or call torch.distributed.init_process_group() first"
            )
        coordinate = mesh.get_coordinate()
        self.is_member = coordinate is not None
        self.shape = MeshShape.of(mesh)
        self.coordinate: Coordinate = tuple(coordinate or [0] * mesh.ndim)
        self.mesh = mesh
        # Read once: a compiler that traces with fake tensors could not read the mesh's own.
        self.ranks: list[int] = mesh.mesh.flatten().tolist()
        self._groups: dict[tuple[int, ...], AxisGroup] = {}
        # How many ranks apart neighbours are, and the machine that plans are made for (comm/machine.py): as it is (that
        # of the mesh which this one is a part of), and as neighbours here see it.
        self.stride = 1 if len(self.ranks) == 1 else max(1, self.ranks[1] - self.ranks[0])
        whole = root_of(mesh)
        self.machine: Cluster = (
            cluster_of(None, mesh.device_type) if whole is mesh else comm_anywhere(whole).machine
        )
        self.cluster: Cluster = self.machine.every(self.stride)
        # In-place ops on the mesh's tensors in inference mode, where torch does not count them (tensor/view_origin.py).
        self.num_writes = 0
        # Of dims whose plain shards a style has given in unequal sizes: those sizes, and those of traced programs
        # (parallel/style.py).
        self.unequal_sizes: set[int] = set()
        self.unequal_traced: set[int] = set()
        # The kinds of module whose plain inputs the ranks have compared: at the first call of each (parallel/style.py).
        self.compared: set[str] = set()
        # Of tensors on the mesh: their interned layouts, and what those of other sizes share (tensor/tensor_layout.py).
        self.layouts: dict[tuple[Any, ...], Any] = {}
        self.kinds: dict[tuple[Any, ...], Any] = {}
        # What functions under `kept_by_mesh` returned.
        self.results: dict[Callable[..., Any], Callable[..., Any]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Nothing in a copy of the mesh, which gets its own; of a type that torch.load allows."""
        return OrderedDict, ()

    @property
    def place(self) -> Place:
        return Place(self.shape, self.coordinate, self.cluster)

    def group(self, axes: tuple[int, ...]) -> AxisGroup:
        """The group over `axes`. Collective over them the first time, if there are several."""
        group = self._groups.get(axes)
        if group is None:
            group = self._groups[axes] = self._make(axes)
        return group

    def global_rank(self, coordinate: Coordinate) -> int:
        return self.ranks[self.shape.index(coordinate)]

    def _make(self, axes: tuple[int, ...]) -> AxisGroup:
        mesh = self.mesh
        members = {self.global_rank(c): c for c in self.shape.members(axes, self.coordinate)}
        if not self.is_member:
            names = tuple(self.shape.axis_name(a) for a in axes)
            return AxisGroup(_Nobody(), "", names, tuple(members.values()), tuple(members), 0, False)  # pyright: ignore[reportArgumentType]
        if len(axes) == 1:
            process_group = mesh.get_group(axes[0])
        elif len(members) == dist.get_world_size():
            assert dist.group.WORLD is not None
            process_group = dist.group.WORLD
        else:
            tell_new_group(tuple(self.shape.axis_name(a) for a in axes), tuple(sorted(members)))
            process_group = new_group(sorted(members))
        assert isinstance(process_group, dist.ProcessGroup), "this rank is a member of its own groups"
        ordered = sorted(members, key=lambda rank: dist.get_group_rank(process_group, rank))
        return AxisGroup(
            process_group=process_group,
            name=process_group.group_name,
            axes=tuple(self.shape.axis_name(a) for a in axes),
            members=tuple(members[rank] for rank in ordered),
            global_ranks=tuple(ordered),
            rank=dist.get_rank(process_group),
            is_gloo=backend_of(process_group, mesh.device_type) == "gloo",
            takes_cpu=has_cpu_backend(process_group),
        )


def backend_of(process_group: dist.ProcessGroup, device: str) -> str:
    """The backend that a group has for a device; one that was made without naming any has one for each device.

    `dist.get_backend` says "undefined" of such a group.
    """
    config = dist.get_backend_config(process_group)  # cpu:gloo,cuda:nccl
    found = dict(entry.split(":", 1) for entry in config.split(",") if ":" in entry)
    return found.get(device, dist.get_backend(process_group))


def has_cpu_backend(process_group: dist.ProcessGroup) -> bool:
    """Whether a group takes tensors of the CPU: gloo does, and a group that was made without naming a backend."""
    return any(entry.startswith("cpu:") for entry in dist.get_backend_config(process_group).split(","))


class _Registry:
    """One MeshComm per DeviceMesh object, held by the mesh and found here by its identity.

    What is known of a mesh is in the mesh, not in a table beside it: layouts and plans point back to the mesh, and a
    table would keep it alive. It is not read from the mesh, since a compiler may not look into one. By identity: two
    equal meshes may belong to different process groups (a destroyed world and its successor).
    """

    def __init__(self) -> None:
        self._comms: dict[int, weakref.ref[MeshComm]] = {}

    def get(self, mesh: DeviceMesh) -> MeshComm:
        found = self._comms.get(id(mesh))
        comm = None if found is None else found()  # alive only as long as its mesh is
        return self._make(mesh) if comm is None else comm

    def _make(self, mesh: DeviceMesh) -> MeshComm:
        with no_dispatch_modes():  # the mesh is real also where a compiler is tracing
            comm, key = MeshComm(mesh), id(mesh)

        def forget(gone: weakref.ref[MeshComm]) -> None:
            if self._comms.get(key) is gone:  # another mesh may have the number by now
                del self._comms[key]

        self._comms[key] = weakref.ref(comm, forget)
        mesh._longmesh_comm = comm  # pyright: ignore[reportAttributeAccessIssue]
        return comm


_registry = _Registry()


def comm_anywhere(mesh: DeviceMesh) -> MeshComm:
    """The MeshComm of a mesh; made on first use. Also on a rank that is not in the mesh (`is_member`)."""
    return _registry.get(mesh)


def comm_of(mesh: DeviceMesh) -> MeshComm:
    """The same; raises on a rank that is not in the mesh."""
    comm = comm_anywhere(mesh)
    if not comm.is_member:
        raise NotDistributedError(
            f"rank {dist.get_rank()} is not in the mesh {mesh.mesh.tolist()}; call this on the mesh's own ranks only"
        )
    return comm


P = ParamSpec("P")
R = TypeVar("R")


def kept_by_mesh(
    maxsize: int,
) -> Callable[[Callable[Concatenate[MeshComm, P], R]], Callable[Concatenate[MeshComm, P], R]]:
    """`functools.lru_cache` for a function whose first argument is a MeshComm: one cache a mesh, gone with the mesh."""

    def decorate(function: Callable[Concatenate[MeshComm, P], R]) -> Callable[Concatenate[MeshComm, P], R]:
        @functools.wraps(function)
        def call(comm: MeshComm, /, *args: P.args, **kwargs: P.kwargs) -> R:
            cached = comm.results.get(function)
            if cached is None:
                cached = functools.lru_cache(maxsize)(functools.partial(function, comm))
                comm.results[function] = cached
            return cached(*args, **kwargs)

        return call

    return decorate
