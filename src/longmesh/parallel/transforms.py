"""Styles under torch.func: grad, vjp, jacrev and vmap of a parallelised module.

torch.func hands tensors on inside a class of its own, so that a DTensor is no longer seen to be one: no layout, no
`redistribute`, no local part. Only a step of autograd is given them bare. So a style's whole forward becomes one such
step, its gradient a second, and vmap runs either once for each of its batch.

Pitfall: a second derivative would be a third step; torch.autograd.grad(create_graph=True) gives one, torch.func none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from longmesh.errors import LongmeshError
from longmesh.parallel.layer import gradients_by_ops

Run = Callable[..., torch.Tensor]


def run_transformed(run: Run, x: torch.Tensor, parameters: tuple[Any, ...], options: tuple[Any, ...]) -> Any:
    """`run(x, *parameters, *options)` of a style, while a transform of torch.func is active. Collective."""
    return _Forward.apply(run, options, x, *parameters)


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(run: Run, options: tuple[Any, ...], *tensors: Any) -> torch.Tensor:
        return run(*tensors, *options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.run, ctx.options, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        needs = tuple(ctx.needs_input_grad[2:])
        made = iter(_Gradients.apply(ctx.run, ctx.options, needs, grads[0], *ctx.saved_tensors))
        return None, None, *(next(made) if needed else None for needed in needs)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise LongmeshError(
            "a parallel style has no forward-mode derivative (torch.func.jvp, jacfwd, hessian): only its backward is "
            "written; use torch.func.vjp or jacrev"
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[torch.Tensor, int]:
        found = [_Forward.apply(*one) for one in _one_by_one(info, in_dims, inputs)]
        return torch.stack(found), 0


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(
        run: Run, options: tuple[Any, ...], needs: tuple[bool, ...], grad: torch.Tensor, *tensors: Any
    ) -> tuple[torch.Tensor, ...]:
        bare = [
            t.detach().requires_grad_() if needed else t for t, needed in zip(tensors, needs, strict=True)
        ]
        made = gradients_by_ops(lambda *given: run(*given, *options), bare, needs, grad)
        found = zip(made, bare, needs, strict=True)
        return tuple([torch.zeros_like(t) if g is None else g.detach() for g, t, needed in found if needed])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        raise LongmeshError(
            "a parallel style has no second derivative under torch.func, whose tensors hide that they are "
            "DTensors; call the module outside of torch.func and use torch.autograd.grad(..., create_graph=True)"
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        found = [_Gradients.apply(*one) for one in _one_by_one(info, in_dims, inputs)]
        stacked = tuple(map(torch.stack, zip(*found, strict=True)))
        return stacked, (0,) * len(stacked)


def _one_by_one(info: Any, in_dims: tuple[Any, ...], inputs: tuple[Any, ...]) -> list[list[Any]]:
    """The inputs for each of a batch."""
    return [
        [
            value.select(dim, number) if isinstance(value, torch.Tensor) and dim is not None else value
            for value, dim in zip(inputs, in_dims, strict=True)
        ]
        for number in range(info.batch_size)
    ]
