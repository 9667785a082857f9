"""Fused optimizer steps, and the gradient scaler's check: one local call on lists of parts.

Everything that belongs to a parameter is redistributed to the parameter's layout; numbers that hold for all
(a step count, a learning rate, a scale) are whole on every rank.
"""

from __future__ import annotations

from typing import Any

import torch

from longmesh._torch import OpOverload
from longmesh.rules.foreach import scalar_of
from longmesh.rules.pieces import without_pending
from longmesh.rules.planned import Planned
from longmesh.rules.rule import Rule
from longmesh.rules.writer import Writer
from longmesh.spec import Layout, Partial


def fused_step(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """_fused_adam_ and its like: parameters, gradients, states and steps, updated in place."""
    params: list[Planned] = args[0]
    moved: list[tuple[Planned, Planned]] = []

    def part(tensor: Planned, param: Planned) -> Planned:
        if tensor.is_plain or param.is_plain or tensor.shape != param.shape:
            return scalar_of(p, tensor, [param])
        there = p.redistribute(tensor, without_pending(param.global_layout))
        if there is not tensor:
            moved.append((tensor, there))
        return there

    lists = [[part(t, q) for t, q in zip(tensors, params, strict=False)] for tensors in args]
    p.local(func, *lists, **{name: scalar_of(p, value, params) for name, value in kwargs.items()})
    for tensor, there in moved:
        p.write(tensor, there)


def unscale(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """_amp_foreach_non_finite_check_and_unscale_: what one rank finds is found on all the meshes of the gradients.

    A pending gradient is checked as what it adds up to.
    """
    grads, found_inf, inv_scale = args
    found, factor = scalar_of(p, found_inf, grads), scalar_of(p, inv_scale, grads)
    parts: list[Any] = []
    for grad in grads:
        if not grad.is_plain and grad.global_layout.partial_axes:
            # A sum of finite terms may overflow: the copy is checked, the terms are scaled.
            parts.append(p.local(torch.clone, p.reduced(grad)))
            p.local(torch.Tensor.mul_, grad, factor)
        else:
            parts.append(grad)
    p.local(func, parts, found, factor)
    seen: list[Any] = []
    for tensor in (*grads, found_inf):
        if not tensor.is_plain and tensor.comm not in seen:
            seen.append(tensor.comm)
            mesh = tensor.global_layout.mesh
            terms = Layout(mesh, [Partial("max")] * mesh.ndim)
            value = p.local(torch.clone, found)
            most = p.replicated(p.wrap(value, tensor, layout=terms, shape=found.shape, dtype=found.dtype))
            p.local(torch.Tensor.copy_, found, most)
    if not found_inf.is_plain:
        p.local(torch.Tensor.copy_, found_inf, found)


STEP = Rule(program=fused_step, mixed=True)

RULES: dict[str, Rule] = {
    **{
        f"_fused_{name}_.{overload}": STEP
        for name in ("adam", "adamw", "sgd", "adagrad")
        for overload in ("default", "tensor_lr")
    },
    "_amp_foreach_non_finite_check_and_unscale_.default": Rule(program=unscale, mixed=True),
}
