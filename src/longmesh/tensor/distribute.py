"""Distribute plain tensors and modules over a mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from longmesh._torch import own_buffers, own_parameters
from longmesh.comm import comm_anywhere, run_plan
from longmesh.comm.agree import agree_on_mesh
from longmesh.comm.scatter import scatter_tensor
from longmesh.errors import LongmeshError
from longmesh.plan import plan_redistribute
from longmesh.spec import Layout, Placement, Replicate
from longmesh.spec.strides import contiguous_stride
from longmesh.tensor.arguments import normalize_placements, resolve_mesh
from longmesh.tensor.compiling import between_graphs
from longmesh.tensor.dtensor import DTensor
from longmesh.tensor.foreign import refuse_inside_transform, refuse_sparse
from longmesh.tensor.meta import check_averages


class Arguments(NamedTuple):
    """What must be the same on every rank."""

    shape: tuple[int, ...]
    dtype: str
    layout: str
    src_data_rank: int
    requires_grad: bool
    is_meta: bool


@between_graphs
def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
    shard_order: Iterable[tuple[int, Sequence[int]]] | None = None,
) -> DTensor:
    """The DTensor whose global value is `tensor`, a leaf.

    The data comes from the rank with coordinate `src_data_rank` on every mesh axis: it sends each rank its shard,
    one at a time. With `src_data_rank=None` nothing is sent: each rank takes its shard from its own `tensor`,
    which must be the same everywhere. Collective (unless None): every rank of the mesh, same arguments. On a rank that
    is not in the mesh the part is empty.

    >>> x = distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [Shard(0)])
    >>> tuple(x.shape), tuple(x.to_local().shape)
    ((3, 2), (2, 2))
    """
    mesh = resolve_mesh(device_mesh, "distribute_tensor")
    if isinstance(tensor, DTensor):
        if tensor.device_mesh != mesh or (placements is not None and tuple(placements) != tensor.placements):
            raise LongmeshError(
                f"distribute_tensor got a DTensor laid out as {tensor.placements}; use redistribute() to change its "
                "layout"
            )
        return tensor
    refuse_inside_transform("distribute_tensor")
    layout = mine = problem = None
    try:
        layout = _checked_layout(tensor, mesh, placements, shard_order, src_data_rank)
        dtype = str(tensor.dtype).removeprefix("torch.")
        given = (tuple(tensor.shape), dtype, str(layout), src_data_rank or 0)
        mine = Arguments(*given, tensor.requires_grad, tensor.is_meta)
    except Exception as error:  # whatever it is: other ranks would wait for this one
        problem = error
    if src_data_rank is not None:
        agree_on_mesh("distribute_tensor", mine, problem, mesh)
    if layout is None:
        assert problem is not None
        raise problem
    local = _make_local(tensor, mesh, layout, src_data_rank)
    requires_grad = tensor.requires_grad
    result = DTensor(local, mesh, layout, tensor.shape, contiguous_stride(tensor.shape), requires_grad)
    return nn.Parameter(result, requires_grad) if isinstance(tensor, nn.Parameter) else result  # pyright: ignore[reportReturnType]


def _checked_layout(
    tensor: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement] | None,
    shard_order: Iterable[tuple[int, Sequence[int]]] | None,
    source: int | None,
) -> Layout:
    """The layout that was asked for, once all arguments of this rank are in order."""
    if not isinstance(tensor, torch.Tensor):
        raise LongmeshError(
            f"distribute_tensor takes a tensor, got {type(tensor).__name__}; make one with torch.as_tensor() first"
        )
    refuse_sparse("distribute_tensor", tensor)
    if not tensor.is_leaf:
        raise LongmeshError(
            "distribute_tensor takes a leaf tensor, got the result of a differentiable op; use DTensor.from_local "
            "in the middle of a computation, or detach() it"
        )
    given = (Replicate(),) * mesh.ndim if placements is None else placements
    layout = Layout(mesh, normalize_placements(given, tensor.ndim, "distribute_tensor"), shard_order)
    layout.check_ndim(tensor.ndim, tensor.shape)
    check_averages(layout, tensor.dtype)
    if source is not None and not tensor.is_meta and not 0 <= source < min(layout.mesh.sizes):
        raise LongmeshError(
            f"src_data_rank={source} is a place on every mesh axis, and the mesh is {layout.mesh.sizes}; "
            f"allowed are 0 to {min(layout.mesh.sizes) - 1}, or None to send nothing"
        )
    return layout


def _make_local(tensor: torch.Tensor, mesh: DeviceMesh, layout: Layout, source: int | None) -> torch.Tensor:
    comm = comm_anywhere(mesh)
    whole = tensor.detach()
    if whole.device.type not in (mesh.device_type, "meta"):
        whole = whole.to(mesh.device_type)
    if not comm.is_member:
        return whole.new_empty(0)
    how = {"itemsize": whole.element_size(), "cluster": comm.cluster}
    terms_later = layout.with_replicated(layout.partial_axes)
    if source is None or whole.is_meta:
        start = Layout.replicated(layout.mesh)
        plan = plan_redistribute(start, layout, shape=whole.shape, **how)
        assert plan.num_collectives == 0, "cutting a replicated tensor is local"
        return run_plan(plan, whole, comm) if plan.steps else whole.clone()
    local = scatter_tensor(whole, terms_later, comm, source=source)
    plan = plan_redistribute(terms_later, layout, shape=whole.shape, **how)
    return run_plan(plan, local, comm)


def compute_local_shape_and_global_offset(
    global_shape: Sequence[int],
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    skip_offset: bool = False,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of this rank's part of a tensor of `global_shape`, and where in the tensor the part begins.

    Local: communicates nothing. With `skip_offset` the offset is empty; on a rank outside of the mesh the part has the
    shape (0,). For the parts of other ranks, or without processes: `Layout.local_shape` and `local_offset`.

    >>> compute_local_shape_and_global_offset((5, 4), mesh, [Shard(0)])
    ((3, 4), (0, 0))
    """
    shape = tuple(global_shape)
    given = normalize_placements(placements, len(shape), "compute_local_shape_and_global_offset")
    layout, coordinate = Layout(mesh, given), mesh.get_coordinate()
    layout.check_ndim(len(shape), shape)
    if coordinate is None:
        return (0,), ()
    where = tuple(coordinate)
    offset = () if skip_offset else layout.local_offset(shape, where)
    return layout.local_shape(shape, where), offset  # pyright: ignore[reportReturnType]


def distribute_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    partition_fn: Callable[[str, nn.Module, DeviceMesh], None] | None = None,
    input_fn: Callable[[nn.Module, Any, DeviceMesh], Any] | None = None,
    output_fn: Callable[[nn.Module, Any, DeviceMesh], Any] | None = None,
) -> nn.Module:
    """Make a module's parameters and buffers DTensors, in place, and return it. Collective.

    `partition_fn(name, submodule, mesh)` distributes what it likes; everything it leaves is replicated.
    `input_fn(module, inputs, mesh)` and `output_fn(module, outputs, mesh)` run before and after forward.

    >>> model = distribute_module(nn.Linear(3, 2), mesh)
    >>> model.weight.placements
    (Replicate(),)
    """
    mesh = resolve_mesh(device_mesh, "distribute_module")
    for name, submodule in module.named_modules():
        if partition_fn is not None:
            partition_fn(name, submodule, mesh)
        _replicate_rest(submodule, mesh)
    if input_fn is not None:
        before = input_fn
        module.register_forward_pre_hook(lambda mod, inputs: before(mod, inputs, mesh))
    if output_fn is not None:
        after = output_fn
        module.register_forward_hook(lambda mod, inputs, outputs: after(mod, outputs, mesh))
    return module


def _replicate_rest(module: nn.Module, mesh: DeviceMesh) -> None:
    everywhere = [Replicate()] * mesh.ndim
    for name, parameter in list(own_parameters(module).items()):
        if parameter is not None and not isinstance(parameter, DTensor):
            replica = distribute_tensor(parameter, mesh, everywhere)
            module.register_parameter(name, replica)  # pyright: ignore[reportArgumentType]
    buffers = own_buffers(module)
    for name, buffer in buffers.items():
        if buffer is not None and not isinstance(buffer, DTensor):
            buffers[name] = distribute_tensor(buffer, mesh, everywhere)
