"""ParallelStyle, and what every style does at a module's door: plain tensors in and out, DTensors inside.

    plain tensor --enter(input layout)--> DTensor --move--> wanted layout | module | output layout --leave--> plain

A plain tensor says nothing of the other ranks' sizes. Where the module knows the whole size (a Linear its
features) uneven shards are right; elsewhere the ranks' shards are taken to be equal, as in `DTensor.from_local`. Once a
style has given plain shards that are not (`use_local_output=True`, a length that does not divide), the ranks exchange
the sizes of plain inputs of such a size. A DTensor knows its sizes: with `use_local_output=False` nothing is asked.
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
    """Replace a parameter by its DTensor, in place. Collective."""
    parameter = getattr(module, name)
    if parameter is not None:
        whole = distribute_tensor(parameter, mesh, [placement], src_data_rank=source)
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
    Collective where it may be one of unequal shards."""
    shape = even_global_shape(layout, local)
    last = len(local) - 1
    if features is None or not layout.shard_axes(last):
        if not may_be_unequal(layout, local, comm):
            return shape
        if is_tracing():
            raise LongmeshError(
                f"{argument}: a style has given plain shards of unequal sizes, and in a compiled function the ranks "
                "can't exchange them; use use_local_output=False, so that DTensors tell their sizes"
            )
        group, rows = gather_rows(local, comm, torch.device(comm.mesh.device_type))
        remedy = "pass the shard that chunking gives each rank, or DTensors"
        return joined_shape(
            dict(zip(group.members, rows, strict=True)), layout, f"{argument}: the input", remedy
        )
    expected = layout.interval(last, features, comm.coordinate)[1]
    if comm.is_member and local[last] != expected:
        raise LongmeshError(
            f"{argument}: this rank's input has {local[last]} features and its share of {features} on "
            f"{layout.mesh.sizes[0]} ranks is {expected}; pass the shard that chunking gives, or give input_layouts= "
            "as the input really is (Replicate() if it is whole)"
        )
    return (*shape[:last], features)


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


def may_be_unequal(layout: Layout, local: Sequence[int], comm: MeshComm) -> bool:
    """Whether a plain tensor may be one of unequal shards that a style has given. The same on every rank, unless the
    shards are unequal and no style has given them."""
    given = comm.unequal_traced if is_tracing() else comm.unequal_sizes
    return bool(given) and comm.is_member and any(local[dim] in given for dim in layout.shard_dims)
