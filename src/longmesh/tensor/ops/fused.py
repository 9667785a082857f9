"""Fused optimizer steps, and the gradient scaler's check: one local call on lists of parts.

Everything that belongs to a parameter is brought to where the parameter lies; numbers that hold for all
(a step count, a learning rate, a scale) are whole on every rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from longmesh.spec import Layout, Partial
from longmesh.tensor.autograd import gradient_layout, move
from longmesh.tensor.dispatch import Handler
from longmesh.tensor.dtensor import DTensor
from longmesh.tensor.ops.foreach import scalar_of

aten = torch.ops.aten


def fused_step(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """_fused_adam_ and its like: parameters, gradients, states and steps, updated in place."""
    params: list[torch.Tensor] = args[0]
    moved: list[tuple[DTensor, DTensor]] = []

    def part(tensor: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        if not isinstance(param, DTensor) or tensor.shape != param.shape:
            return scalar_of(tensor)
        layout = gradient_layout(param._layout)
        if tensor._layout is layout:
            return tensor._local_tensor
        there = move(tensor, layout)
        moved.append((tensor, there))
        return there._local_tensor

    lists = [[part(t, p) for t, p in zip(tensors, params, strict=False)] for tensors in args]
    func(*lists, **{name: scalar_of(value) for name, value in kwargs.items()})
    for tensor, there in moved:
        tensor.copy_(there)


def unscale(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """_amp_foreach_non_finite_check_and_unscale_: what one rank finds is found on all.

    Collective over the meshes of the gradients. A pending gradient is checked as what it adds up to.
    """
    grads, found_inf, inv_scale = args
    found, factor = scalar_of(found_inf), scalar_of(inv_scale)
    parts: list[torch.Tensor] = []
    for grad in grads:
        if not isinstance(grad, DTensor):
            parts.append(grad)
        elif grad._layout.partial_axes:
            # A sum of finite terms may overflow: the copy is checked, the terms are scaled.
            parts.append(move(grad, gradient_layout(grad._layout))._local_tensor.clone())
            grad._local_tensor.mul_(factor)
        else:
            parts.append(grad._local_tensor)
    func(parts, found, factor)
    seen: list[Any] = []
    for tensor in (*grads, found_inf):
        if isinstance(tensor, DTensor) and tensor._tensor_layout.comm not in seen:
            seen.append(tensor._tensor_layout.comm)
            _share_maximum(found, tensor)
    if isinstance(found_inf, DTensor):
        found_inf._local_tensor.copy_(found)


def _share_maximum(value: torch.Tensor, like: DTensor) -> None:
    """The largest of every rank's `value`, on all of them."""
    mesh = like._layout.mesh
    terms = Layout(mesh, [Partial("max")] * mesh.ndim)
    held = DTensor(value.clone(), like._mesh, terms, value.shape, value.stride())
    value.copy_(move(held, Layout.replicated(mesh))._local_tensor)


HANDLERS: dict[OpOverload, Handler] = {
    **{
        getattr(packet, overload): fused_step
        for packet in (aten._fused_adam_, aten._fused_adamw_, aten._fused_sgd_, aten._fused_adagrad_)
        for overload in ("default", "tensor_lr")
    },
    aten._amp_foreach_non_finite_check_and_unscale_.default: unscale,
}
