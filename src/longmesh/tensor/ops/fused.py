"""Fused optimizer steps, and the gradient scaler's check: one local call on lists of parts.

Everything that belongs to a parameter is redistributed to the parameter's layout; numbers that hold for all
(a step count, a learning rate, a scale) are whole on every rank.
"""

from __future__ import annotations

from typing import Any

import torch

from longmesh._torch import OpOverload, aten
from longmesh.spec import Layout, Partial
from longmesh.tensor.autograd import gradient_layout
from longmesh.tensor.make_plan import Family
from longmesh.tensor.ops.foreach import scalar_of
from longmesh.tensor.planned import Planned
from longmesh.tensor.planner import Planner


def fused_step(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """_fused_adam_ and its like: parameters, gradients, states and steps, updated in place."""
    params: list[Planned] = args[0]
    moved: list[tuple[Planned, Planned]] = []

    def part(tensor: Planned, param: Planned) -> Planned:
        if tensor.is_plain or param.is_plain or tensor.shape != param.shape:
            return scalar_of(p, tensor, [param])
        there = p.redistribute(tensor, gradient_layout(param._layout))
        if there is not tensor:
            moved.append((tensor, there))
        return there

    lists = [[part(t, q) for t, q in zip(tensors, params, strict=False)] for tensors in args]
    p.local(func, *lists, **{name: scalar_of(p, value, params) for name, value in kwargs.items()})
    for tensor, there in moved:
        p.write(tensor, there)


def unscale(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """_amp_foreach_non_finite_check_and_unscale_: what one rank finds is found on all the meshes of the gradients.

    A pending gradient is checked as what it adds up to.
    """
    grads, found_inf, inv_scale = args
    found, factor = scalar_of(p, found_inf, grads), scalar_of(p, inv_scale, grads)
    parts: list[Any] = []
    for grad in grads:
        if not grad.is_plain and grad._layout.partial_axes:
            # A sum of finite terms may overflow: the copy is checked, the terms are scaled.
            parts.append(p.local(torch.clone, p.reduced(grad)))
            p.local(torch.Tensor.mul_, grad, factor)
        else:
            parts.append(grad)
    p.local(func, parts, found, factor)
    seen: list[Any] = []
    for tensor in (*grads, found_inf):
        if not tensor.is_plain and tensor._tensor_layout.comm not in seen:
            seen.append(tensor._tensor_layout.comm)
            mesh = tensor._layout.mesh
            terms = Layout(mesh, [Partial("max")] * mesh.ndim)
            value = p.local(torch.clone, found)
            most = p.replicated(p.wrap(value, tensor, layout=terms, shape=found.shape, dtype=found.dtype))
            p.local(torch.Tensor.copy_, found, most)
    if not found_inf.is_plain:
        p.local(torch.Tensor.copy_, found_inf, found)


MIXED: dict[OpOverload, Family] = {
    **{
        getattr(packet, overload): fused_step
        for packet in (aten._fused_adam_, aten._fused_adamw_, aten._fused_sgd_, aten._fused_adagrad_)
        for overload in ("default", "tensor_lr")
    },
    aten._amp_foreach_non_finite_check_and_unscale_.default: unscale,
}
