"""Gradients that were computed without a graph, and say so when a second derivative is asked of them.

torch's `once_differentiable` stays silent where the incoming gradient is a constant, as that of a loss is: what a
second derivative gets through such a function would be missing from it without a word.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from longmesh.errors import LongmeshError

Backward = Callable[..., Any]


def first_derivative_only(text: str) -> Callable[[Backward], Backward]:
    """A decorator of an autograd function's `backward`: it runs without a graph, and to differentiate what it returns
    is an error with this text."""

    def decorate(backward: Backward) -> Backward:
        @functools.wraps(backward)
        def run(ctx: Any, *grads: Any) -> tuple[Any, ...]:
            with torch.no_grad():
                found = backward(ctx, *grads)
            return without_second(text, found)

        return run

    return decorate


def without_second(text: str, grads: Sequence[Any]) -> tuple[Any, ...]:
    """The gradients as they are, or, under create_graph=True, with a node that refuses to be differentiated."""
    if not torch.is_grad_enabled():
        return tuple(grads)
    anchor = torch.zeros((), requires_grad=True)
    return tuple(_Refuse.apply(text, anchor, g) if isinstance(g, Tensor) else g for g in grads)


class _Refuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, text: str, anchor: Tensor, grad: Tensor) -> Tensor:
        ctx.text = text
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise LongmeshError(ctx.text)


def refuse_second_derivative(what: str) -> None:
    """Raise if a backward pass is itself being recorded. Called first in one that exchanges states, so every rank
    raises."""
    if torch.is_grad_enabled():
        raise LongmeshError(
            f"a second derivative through {what} over a cut sequence is not supported; call backward() or "
            "autograd.grad() without create_graph=True"
        )
