"""Process groups that only their members make, and the mesh that a mesh is a part of."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from longmesh._torch.lookup import find

_ROOM = "torch.distributed.distributed_c10d"
_FEATURE = "groups of ranks that know different numbers of groups"


def new_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """A group that its members make, and nobody else. `ranks`: in order, this one among them.

    torch's own, with use_local_synchronization, is named by how many groups its rank knows: members that know different
    numbers, as after sub-meshes, would wait for each other for ever. This name is of the members, and of how often they
    made one.
    """
    make = find(f"{_ROOM}:_new_process_group_helper", _FEATURE, otherwise=None)
    world = find(f"{_ROOM}:_world", _FEATURE, otherwise=None)
    default = dist.group.WORLD
    assert default is not None, "there is a process group"
    if make is None or world is None or hasattr(default, "new_group"):
        found = dist.new_group(list(ranks), use_local_synchronization=True)
        assert isinstance(found, dist.ProcessGroup), "this rank is a member"
        return found
    backend, store = world.pg_map[default]
    stem = f"longmesh {' '.join(map(str, ranks))} "
    number = sum(name.startswith(stem) for name in world.pg_names.values())
    group, _ = make(
        len(ranks),
        ranks.index(dist.get_rank()),
        list(ranks),
        dist.Backend(backend),
        store,
        f"{stem}#{number}",
        timeout=dist.distributed_c10d.default_pg_timeout,
        device_id=default.bound_device_id,
    )
    world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


def root_of(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that this one was taken out of; itself, if it is whole."""
    find_root = find(
        "torch.distributed.device_mesh:DeviceMesh._get_root_mesh",
        "the machine of a whole mesh",
        otherwise=None,
    )
    return mesh if find_root is None else find_root(mesh)
