"""ParallelStyle, and what every style does at a module's door: plain tensors in and out, DTensors inside.

    plain tensor --enter(input layout)--> DTensor --move--> wanted layout | module | output layout --leave--> plain

A plain tensor says nothing of the other ranks' sizes. The ranks compare them at the first call of each kind of module.
If the shards are equal there, they are taken to be equal from then on, as in `DTensor.from_local`. Where the module
knows the whole size (a Linear its features) uneven shards are right. Once plain shards were unequal, or a style has
given such (`use_local_output=True`, a length that does not divide), the ranks exchange the sizes of plain inputs of
such a size. A DTensor knows its sizes: with `use_local_output=False` nothing is asked.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from longmesh._torch import is_tracing, own_buffers
from longmesh.comm import MeshComm, comm_anywhere
from longmesh.comm.verify import gather_rows
from longmesh.errors import LongmeshError
from longmesh.spec import Layout, MeshShape, Placement, Replicate
from longmesh.spec.placement import check_kinds
from longmesh.tensor import DTensor, distribute_tensor
from longmesh.tensor.arguments import normalize_placements
from longmesh.tensor.meta import even_global_shape, joined_shape
from longmesh.tensor.tensor_layout import TensorLayout


class ParallelStyle(ABC):
    """How one module is parallelised. Subclass it and write `_apply`; `parallelize_module` calls it.

    >>> class Freeze(ParallelStyle):
    ...     def _apply(self, module, device_mesh):
    ...         return module.requires_grad_(False)
    >>> parallelize_module(nn.Linear(4, 4), mesh, Freeze()).weight.requires_grad
    False
    """

    src_data_rank: int | None = 0

    @abstractmethod
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Parallelise `module` in place and return it. Collective."""

    def _check(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:  # noqa: B027
        """Raise if this style can't take `module`. Sends nothing; runs for a whole plan before any `_apply`."""


def check_placement(given: Any, argument: str) -> Placement:
    """A longmesh placement, or an error that names the argument."""
    check_kinds((given,), f"{argument}=")
    return given


def check_one_axis(mesh: DeviceMesh, caller: str) -> None:
    """A style has one placement, so it works on one mesh axis."""
    if mesh.ndim != 1:
        shape = MeshShape.of(mesh)
        name = shape.names[-1] if shape.names is not None else None
        fix = f"mesh[{name!r}]" if name is not None else "a mesh with mesh_dim_names, sliced by name"
        raise LongmeshError(
            f"{caller} works on one mesh axis, got {shape} with {mesh.ndim}; pass the axis to shard modules over: {fix}"
        )


def check_module(
    style: ParallelStyle, name: str, module: nn.Module, kinds: tuple[type[nn.Module], ...]
) -> None:
    """Raise unless the style can take this kind of module."""
    if not isinstance(module, kinds):
        allowed = " and ".join(f"nn.{kind.__name__}" for kind in kinds)
        raise LongmeshError(
            f"{type(style).__name__} can't take {describe_module(name, module)}: it shards {allowed}; name one of its "
            "submodules in the plan, or write a ParallelStyle of your own"
        )


def describe_module(name: str, module: nn.Module) -> str:
    return f"{type(module).__name__} '{name}'" if name else f"the {type(module).__name__} itself"


def distribute_parameter(
    module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement, source: int | None
) -> None:
    """Replace a parameter by its DTensor, placed so on every axis, in place. Collective."""
    parameter = getattr(module, name)
    if parameter is not None:
        whole = distribute_tensor(parameter, mesh, [placement] * mesh.ndim, src_data_rank=source)
        module.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))


def replicate_buffers(module: nn.Module, mesh: DeviceMesh, source: int | None) -> None:
    """Make a module's buffers DTensors, whole on every rank, so that its ops can use them. Collective."""
    for part in module.modules():
        buffers = own_buffers(part)
        for name, buffer in buffers.items():
            if buffer is not None and not isinstance(buffer, DTensor):
                buffers[name] = distribute_tensor(buffer, mesh, [Replicate()], src_data_rank=source)


# -- layouts -------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def layout_on(mesh: MeshShape, placement: Placement, ndim: int, argument: str) -> Layout:
    """The layout of a tensor of `ndim` dims on the one axis of `mesh`, negative dims counted from the end."""
    layout = Layout(mesh, normalize_placements((placement,), ndim, argument))
    layout.check_ndim(ndim)
    return layout


def whole_shape(
    layout: Layout, local: Sequence[int], comm: MeshComm, features: int | None, argument: str
) -> tuple[int, ...]:
    """The global shape of this rank's part of shape `local`; its last dim is `features` long where that is known.
    Collective where the sizes of the other ranks' parts are asked for."""
    last = len(local) - 1
    known = features if layout.shard_axes(last) else None
    if sizes_are_asked(layout, local, comm, features, argument):
        if is_tracing():
            raise LongmeshError(
                f"{argument}: a style has given plain shards of unequal sizes, and in a compiled function the ranks "
                "can't exchange them; use use_local_output=False, so that DTensors tell their sizes"
            )
        return _compared_shape(layout, local, comm, known, argument)
    shape = even_global_shape(layout, local)
    if known is None:
        return shape
    if comm.is_member:
        _check_features({comm.coordinate: local}, layout, known, argument)
    return (*shape[:last], known)


def _compared_shape(
    layout: Layout, local: Sequence[int], comm: MeshComm, features: int | None, argument: str
) -> tuple[int, ...]:
    """The global shape, from the sizes of all ranks' parts; sizes that differ are asked for again. Raises on all ranks
    or on none. Collective."""
    group, rows = gather_rows(local, comm, torch.device(comm.mesh.device_type))
    parts = dict(zip(group.members, rows, strict=True))
    if features is not None:
        _check_features(parts, layout, features, argument)
    remedy = "pass the shard that chunking gives each rank, or DTensors"
    shape = joined_shape(parts, layout, f"{argument}: the input", remedy)
    if features is None and rows.count(rows[0]) != len(rows):
        comm.unequal_sizes.update(row[dim] for row in rows for dim in layout.shard_dims)
    comm.compared.add(argument)
    return shape


def _check_features(parts: dict[tuple[int, ...], Any], layout: Layout, features: int, argument: str) -> None:
    for coordinate, part in parts.items():
        expected = layout.interval(len(part) - 1, features, coordinate)[1]
        if part[-1] != expected:
            raise LongmeshError(
                f"{argument}: the input of rank {coordinate[0]} has {part[-1]} features and its share of {features} on "
                f"{layout.mesh.sizes[0]} ranks is {expected}; pass the shard that chunking gives, or give "
                "input_layouts= as the input really is (Replicate() if it is whole)"
            )


# -- in and out ----------------------------------------------------------------------------------


def enter(
    tensor: torch.Tensor, mesh: DeviceMesh, placement: Placement, argument: str, features: int | None = None
) -> DTensor:
    """A DTensor from what a module is given: plain tensors are shards laid out as `placement` says."""
    if isinstance(tensor, DTensor):
        if tensor.device_mesh != mesh:
            raise LongmeshError(
                f"{argument}: the input is on {tensor.device_mesh} and the module on {mesh}; put them on one mesh"
            )
        return tensor
    layout = layout_on(MeshShape.of(mesh), placement, tensor.ndim, argument)
    shape = whole_shape(layout, tensor.shape, comm_anywhere(mesh), features, argument)
    return DTensor.from_local(tensor, mesh, layout.placements, shape=shape)


def arrange(tensor: DTensor, placement: Placement) -> DTensor:
    """The DTensor in the layout that is wanted. Collective where it has another."""
    wanted = normalize_placements((placement,), tensor.ndim, "a layout")
    return tensor if tensor.placements == wanted else tensor.redistribute(placements=wanted)


def leave(tensor: DTensor, placement: Placement, *, local: bool) -> torch.Tensor:
    """What a module gives: in the output layout, and this rank's part of it if `local`."""
    return give(arrange(tensor, placement), local=local)


def give(tensor: DTensor, *, local: bool) -> torch.Tensor:
    """The tensor, or this rank's part of it."""
    if not local:
        return tensor
    note_unequal(tensor._tensor_layout)
    return tensor.to_local()


def note_unequal(own: TensorLayout) -> None:
    """Plain shards of a tensor that is laid out so are about to be given: if they are unequal in a dim that no module
    knows (it knows the last), what is plain is no longer taken to be equal. The same on every rank."""
    sizes = own.layout.mesh.sizes
    for dim, axes in own.layout.shard_order:
        if (
            not own.is_symbolic
            and dim < len(own.shape) - 1
            and own.shape[dim] % math.prod(sizes[a] for a in axes)
        ):
            parts = {
                int(own.layout.interval(dim, own.shape[dim], c)[1]) for c in own.layout.mesh.coordinates()
            }
            own.comm.unequal_sizes |= parts
            own.comm.unequal_traced |= parts if is_tracing() else set()


def sizes_are_asked(
    layout: Layout, local: Sequence[int], comm: MeshComm, features: int | None, argument: str
) -> bool:
    """Whether the ranks compare the sizes of their parts of a plain input: at the first call of a kind of module, and
    where it may be one of unequal shards of an unknown size. The same on every rank, unless shards that were equal at
    that first call are unequal now, and no style has given them."""
    if not comm.is_member or comm.shape.num_ranks == 1:
        return False
    if not is_tracing() and argument not in comm.compared:
        return True
    given = comm.unequal_traced if is_tracing() else comm.unequal_sizes
    if not given or (features is not None and layout.shard_axes(len(local) - 1)):
        return False
    return any(local[dim] in given for dim in layout.shard_dims)
