"""Gradients that were computed without a graph, and say so when a second derivative is asked of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longmesh.errors import LongmeshError


def without_second(what: str, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """The gradients as they are, or, under create_graph=True, with a node that refuses to be differentiated.

    torch's `once_differentiable` stays silent where the incoming gradient is a constant, as that of a loss is.
    """
    if not torch.is_grad_enabled():
        return grads
    anchor = torch.zeros((), requires_grad=True)
    return tuple(None if grad is None else _Refuse.apply(what, anchor, grad) for grad in grads)


class _Refuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, what: str, anchor: Tensor, grad: Tensor) -> Tensor:
        ctx.what = what
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise LongmeshError(
            f"{ctx.what} has no second derivative: its gradient is computed tile by tile, without a graph; compute "
            "the logits and torch.nn.functional.cross_entropy where you need one"
        )
