"""Arguments that every entry of the DTensor API takes: a mesh and placements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from torch.distributed.device_mesh import DeviceMesh

from longmesh._torch import entered_meshes
from longmesh._torch.process_groups import root_of
from longmesh.errors import LongmeshError
from longmesh.spec import Placement
from longmesh.spec.placement import check_kinds, with_positive_dims


def resolve_mesh(mesh: DeviceMesh | None, caller: str) -> DeviceMesh:
    """The mesh given, or that of the enclosing `with mesh:`."""
    if mesh is not None:
        return mesh
    stack = entered_meshes()
    if not stack:
        raise LongmeshError(
            f"{caller} needs a mesh: pass device_mesh=init_device_mesh('cpu', (ranks,)) or call it inside `with mesh:`"
        )
    return stack[-1]


def refuse_meshes(first: DeviceMesh, second: DeviceMesh) -> NoReturn:
    """Tensors of two meshes in one op."""
    raise LongmeshError(
        f"one op on tensors of two meshes: {first} and {second}; put them on one mesh first (full_tensor(), then "
        "distribute_tensor())"
    )


def check_scalar_mesh(mesh: DeviceMesh, other: DeviceMesh) -> None:
    """A scalar of the mesh `other` in an op on `mesh`: each of its ranks must have it, or that of its own slice where
    `other` is one. The same on every rank."""
    if not set(mesh.mesh.flatten().tolist()) <= set(root_of(other).mesh.flatten().tolist()):
        refuse_meshes(mesh, other)


def normalize_placements(placements: Sequence[Placement], ndim: int, caller: str) -> tuple[Placement, ...]:
    """Placements with negative dims counted from the end, each of longmesh's own classes."""
    check_kinds(placements, f"{caller}: ")
    return with_positive_dims(placements, ndim, caller)
