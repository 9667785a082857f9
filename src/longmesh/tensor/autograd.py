"""The three differentiable crossings: from_local, to_local, redistribute.

Redistribution is the identity on the global tensor, and so is its gradient: the gradient goes back to
the layout the tensor came from, replicated where that was a pending reduction. Local factors enter
only where local tensors do: a rank's term of an average over n ranks counts 1/n in the global tensor.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from longmesh._torch import functorch_level
from longmesh.comm import MeshComm, comm_anywhere, kept_by_mesh, run_plan
from longmesh.comm.agree import agree_on_mesh
from longmesh.comm.verify import broadcast_replicas, verify_local_shapes
from longmesh.errors import LongmeshError
from longmesh.spec import Layout, MeshShape, Partial, Placement
from longmesh.spec.strides import contiguous_stride, global_stride, stride_like
from longmesh.tensor.arguments import normalize_placements
from longmesh.tensor.dtensor import DTensor, wrap
from longmesh.tensor.foreign import refuse_transformed
from longmesh.tensor.mask_buffer import without_mask
from longmesh.tensor.meta import check_averages, even_global_shape
from longmesh.tensor.tensor_layout import TensorLayout, tensor_layout
from longmesh.tensor.view_origin import check_known, is_outdated, refresh


@functools.lru_cache(maxsize=4096)
def _layout_of_parts(
    mesh: MeshShape, placements: tuple[Placement, ...], ndim: int, dtype: torch.dtype
) -> Layout:
    layout = Layout(mesh, normalize_placements(placements, ndim, "from_local"))
    check_averages(layout, dtype)
    return layout


def make_tensor_layout_of_parts(
    comm: MeshComm,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    stride: tuple[int, ...] | None,
    dtype: torch.dtype,
) -> TensorLayout:
    """What equal parts of `shape` make up; `stride` of a part, None if it is contiguous."""
    layout = _layout_of_parts(comm.shape, placements, len(shape), dtype)
    layout.check_ndim(len(shape), shape)
    whole = even_global_shape(layout, shape)
    strides = contiguous_stride(whole) if stride is None else stride_like(whole, stride)
    return tensor_layout(comm, layout, whole, strides, dtype)


tensor_layout_of_parts = kept_by_mesh(4096)(make_tensor_layout_of_parts)


class LocalArguments(NamedTuple):
    """What must be the same on every rank in from_local(run_check=True); sizes are compared with the layout's."""

    ndim: int
    dtype: str
    requires_grad: bool
    placements: str
    shape: str
    stride: str
    grad_placements: str
    shard_order: str


def agree_on_local(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], *options: object
) -> None:
    """Raise on every rank unless all pass the same to from_local. Collective over the mesh."""
    shape, stride, grads, order = ("" if option is None else str(option) for option in options)
    mine = LocalArguments(
        local.ndim,
        str(local.dtype).removeprefix("torch."),
        local.requires_grad,
        str(tuple(placements)),
        shape,
        stride,
        grads,
        order,
    )
    agree_on_mesh("from_local(run_check=True)", mine, None, mesh)


def from_local(
    local: torch.Tensor,
    mesh: DeviceMesh,
    layout: Layout,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
    run_check: bool,
    grad_placements: tuple[Placement, ...] | None,
) -> DTensor:
    comm = comm_anywhere(mesh)
    whole = even_global_shape(layout, local.shape) if shape is None else tuple(shape)
    expected = layout.local_shape(whole, comm.coordinate) if len(whole) == local.ndim else None
    if not comm.is_member:
        strides = contiguous_stride(whole) if stride is None else tuple(stride)
        needs_grad = local.requires_grad and torch.is_grad_enabled()
        return DTensor(local.new_empty(0), mesh, layout, whole, strides, needs_grad)
    if run_check:
        verify_local_shapes(local, layout, whole, comm, given=shape is not None)
        local = broadcast_replicas(local, layout, comm)
    elif shape is not None and expected != tuple(local.shape):
        raise LongmeshError(
            f"from_local: shape={whole} laid out as {layout} on {layout.mesh} gives coordinate {comm.coordinate} "
            f"a shard of {expected}, but its local tensor is {tuple(local.shape)}; pass the shard that "
            "chunking gives this rank, or the right global shape"
        )
    strides = global_stride(whole, local) if stride is None else tuple(stride)
    if local.requires_grad and torch.is_grad_enabled():
        for placement in layout.placements:
            check_differentiable(placement, "from_local")
        if functorch_level() is not None:
            refuse_transformed("from_local")
        return _FromLocal.apply(local, mesh, layout, whole, strides, grad_placements)
    return DTensor(local.detach(), mesh, layout, whole, strides)


def to_local(tensor: DTensor, grad_placements: tuple[Placement, ...] | None) -> torch.Tensor:
    if tensor._lookup is not None:
        apply_lookup_mask(tensor)
    if tensor._origin is not None:
        check_current(tensor)
    if tensor.requires_grad and torch.is_grad_enabled():
        if functorch_level() is not None:
            refuse_transformed("to_local")
        return _ToLocal.apply(tensor, grad_placements)
    return tensor._local_tensor


def redistribute(
    tensor: DTensor,
    layout: Layout,
    async_op: bool,
    forward_dtype: torch.dtype | None,
    backward_dtype: torch.dtype | None,
) -> DTensor:
    if layout is tensor._layout and forward_dtype is None and backward_dtype is None:
        return torch.ops.aten.alias(tensor)  # on the same memory, so their writes are counted together
    if tensor.requires_grad and torch.is_grad_enabled():
        if functorch_level() is not None:
            refuse_transformed("redistribute")
        return _Redistribute.apply(tensor, layout, async_op, forward_dtype, backward_dtype)
    return move(tensor, layout, async_op=async_op, dtype=forward_dtype)


def move(
    tensor: DTensor, layout: Layout, *, async_op: bool = False, dtype: torch.dtype | None = None
) -> DTensor:
    """Redistribute without autograd. Collective."""
    if tensor._lookup is not None and tensor._layout is layout and dtype is None:
        return tensor
    local = part_moved(tensor, layout, async_op=async_op, dtype=dtype)
    return DTensor(local, tensor._mesh, layout, tensor.shape, global_stride(tensor.shape, local))


def part_moved(
    tensor: DTensor, layout: Layout, *, async_op: bool = False, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """This rank's part of the tensor in another layout. Collective."""
    local, own = current_part(tensor), tensor._tensor_layout
    if dtype is not None:
        local = local.to(dtype)
        own = tensor_layout(own.comm, own.layout, own.shape, own.stride, dtype)
    if own.layout is not layout:
        local = run_plan(own.route(layout), local, own.comm, async_op=async_op)
    return local


def current_part(tensor: DTensor) -> torch.Tensor:
    """This rank's part as it is laid out, with nothing left to do on it. Collective for a view that has to be read
    again (view_origin.py)."""
    if tensor._lookup is not None:
        apply_lookup_mask(tensor)
    if tensor._origin is not None:
        refresh(tensor)
    return tensor._local_tensor


def copy_of_view(view: DTensor) -> DTensor:
    """What a view shows, in memory of its own. Collective where the view has to be read again."""
    return wrap(current_part(view).clone(), view._tensor_layout.as_copied_view(False))


def check_current(tensor: DTensor) -> None:
    """Refuse a view that would have to be read again, where nothing may be sent."""
    check_known(tensor)
    if is_outdated(tensor):
        raise LongmeshError(
            f"the tensor of shape {tuple(tensor.shape)} is a view along a sharded dim: its local tensor is a copy, and "
            "the tensor that it is a view of was written to since; call clone() or redistribute() on it first, on "
            "every rank"
        )


def apply_lookup_mask(tensor: DTensor) -> None:
    """Apply the mask of a pending lookup and give it back: the tensor becomes a plain pending sum, the same value."""
    lookup = tensor._lookup
    assert lookup is not None, "only a pending lookup has a mask"
    lookup.take(tensor._local_tensor)
    tensor._tensor_layout = tensor_layout(
        tensor._tensor_layout.comm, without_mask(tensor._layout), tensor.shape, tensor.stride(), tensor.dtype
    )
    tensor._lookup = None


def check_differentiable(placement: Placement, caller: str) -> None:
    """Refuse reductions whose gradient can't be told from one rank's term."""
    if isinstance(placement, Partial) and placement.reduce_op in ("product", "min", "max"):
        raise LongmeshError(
            f"{caller}: no gradient goes through {placement!r}: it would depend on the other ranks' terms; "
            "reduce it first (redistribute to Replicate() or Shard()), or detach() the tensor"
        )


def check_gradient(grad: torch.Tensor, caller: str) -> None:
    """Refuse a plain gradient of a DTensor: a Function of the user gave it, and only its owner knows its layout."""
    if not isinstance(grad, DTensor):
        raise LongmeshError(
            f"the gradient that goes back through {caller} is a plain tensor of shape {tuple(grad.shape)}, not a "
            "DTensor; a torch.autograd.Function whose output is not used is given plain zeros for it: call "
            "ctx.set_materialize_grads(False) in its forward and pass None on"
        )


def gradient_layout(layout: Layout, placements: tuple[Placement, ...] | None = None) -> Layout:
    """How a gradient is laid out by default: as the tensor, and replicated where that is pending."""
    if placements is not None:
        return Layout(layout.mesh, placements)
    return layout.with_replicated(layout.partial_axes)


def _average_size(layout: Layout) -> int:
    """Over how many ranks the pending averages of a layout run."""
    return math.prod(layout.mesh.sizes[a] for a, p in enumerate(layout.placements) if p == Partial("avg"))


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        local: torch.Tensor,
        mesh: DeviceMesh,
        layout: Layout,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        grad_placements: tuple[Placement, ...] | None,
    ) -> DTensor:
        ctx.layout, ctx.grad_placements = layout, grad_placements
        ctx.set_materialize_grads(False)
        return DTensor(local.detach(), mesh, layout, shape, stride, requires_grad=True)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        (grad,) = grads
        if grad is None:
            return None, None, None, None, None, None
        check_gradient(grad, "from_local")
        layout = gradient_layout(ctx.layout, ctx.grad_placements)
        local = to_local(redistribute(grad, layout, False, None, None), None)
        factor = _average_size(ctx.layout)
        return (local / factor if factor > 1 else local), None, None, None, None, None


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor, grad_placements: tuple[Placement, ...] | None) -> torch.Tensor:
        ctx.mesh, ctx.layout, ctx.shape = tensor._mesh, tensor._layout, tensor.shape
        ctx.grad_placements = grad_placements
        ctx.set_materialize_grads(False)
        local = tensor._local_tensor
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        (grad,) = grads
        if grad is None:
            return None, None
        factor = _average_size(ctx.layout)
        layout = gradient_layout(ctx.layout, ctx.grad_placements)
        grad = grad * factor if factor > 1 else grad
        stride = global_stride(ctx.shape, grad)
        if torch.is_grad_enabled() and grad.requires_grad:  # a second derivative is asked for
            return _FromLocal.apply(grad, ctx.mesh, layout, ctx.shape, stride, None), None
        return DTensor(grad, ctx.mesh, layout, ctx.shape, stride), None


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: DTensor,
        layout: Layout,
        async_op: bool,
        forward_dtype: torch.dtype | None,
        backward_dtype: torch.dtype | None,
    ) -> DTensor:
        ctx.layout, ctx.dtype = tensor._layout, tensor.dtype
        ctx.backward_dtype, ctx.async_op = backward_dtype, async_op
        ctx.set_materialize_grads(False)
        return move(tensor, layout, async_op=async_op, dtype=forward_dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        (grad,) = grads
        if grad is None:
            return None, None, None, None, None
        check_gradient(grad, "redistribute")
        layout = gradient_layout(ctx.layout)
        moved = redistribute(grad, layout, ctx.async_op, ctx.backward_dtype, None)
        if moved.dtype != ctx.dtype:
            moved = redistribute(moved, layout, False, ctx.dtype, None)
        return moved, None, None, None, None
