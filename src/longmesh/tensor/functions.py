"""Functions of torch that run as one op on DTensors, above autograd: products with a `Factor` (a tensor that is sharded
between its first and last dim, a linear layer's weight).

    F.linear(x, w, b)   one op and one step of autograd, linear_backward; x may be sharded along any of its batch dims
    x @ y               the same with matmul and matmul_backward
    torch.einsum        of two operands; its gradients are einsums, too
    nn.MultiheadAttention   as it is: its plain masks are known to be masks
    backward, grad      as they are, with what they call (hooks, recomputed checkpoints) seen by these functions too

torch itself flattens x of shape (batch, tokens, features) to batch * tokens rows. Where tokens are sharded, a rank's
rows are not one interval of those, and x would have to be redistributed. Besides, torch splits a linear layer into two
to four ops forward and up to nine backward, each dispatched. Every other function goes on to torch and comes back, op
by op, below autograd (dispatch.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F

from longmesh._torch import (
    aten,
    below_autograd,
    dispatch_mode_count,
    functorch_level,
    is_any_autocast_enabled,
    no_subclass_functions,
)
from longmesh.rules.product import einsum_terms, matmul_first_gradient, matmul_second_gradient
from longmesh.tensor.dispatch import dispatch
from longmesh.tensor.dtensor import DTensor, Factor
from longmesh.tensor.plain import in_module_attention

Function = Callable[..., Any]


def run_below_autograd(op: Any, *args: Any) -> Any:
    """An op on DTensors as autograd would call it: modes see it."""
    if not dispatch_mode_count() and functorch_level() is None:
        return dispatch.from_torch(op, (), args)
    with below_autograd():
        return op(*args)


def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """F.linear of DTensors, or NotImplemented where torch's own way is as good or the only one."""
    if is_any_autocast_enabled():
        x, weight, bias = _cast(x, weight, bias)
    operands = (x, weight) if bias is None else (x, weight, bias)
    if not _can_take(*operands) or len(weight._tensor_layout.shape) != 2 or not x._tensor_layout.shape:
        return NotImplemented
    if torch.is_grad_enabled() and (
        weight.requires_grad or x.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return _apply_linear(x, weight, bias)
    return run_below_autograd(aten.linear.default, x, weight, bias)


def matmul(a: Any, b: Any) -> Any:
    """torch.matmul of DTensors, or NotImplemented; a product of two matrices is one op to torch, too."""
    a, b = _cast(a, b)
    if not _can_take(a, b) or a.ndim == 0 or b.ndim == 0 or a.ndim == b.ndim == 2:
        return NotImplemented
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return _apply_matmul(a, b)
    return run_below_autograd(aten.matmul.default, a, b)


def einsum(equation: Any, *operands: Any) -> Any:
    """torch.einsum of two DTensors, or NotImplemented."""
    operands = _cast(*operands)
    if not isinstance(equation, str) or len(operands) != 2 or not _can_take(*operands):
        return NotImplemented
    terms = einsum_terms(equation, [tuple(t.shape) for t in operands])
    if terms is None:
        return NotImplemented
    if torch.is_grad_enabled() and any(t.requires_grad for t in operands):
        return _apply_einsum(terms, *operands)
    return _run_einsum(terms, *operands)


def _run_einsum(terms: tuple[str, str, str], a: DTensor, b: DTensor) -> Any:
    return run_below_autograd(aten.einsum.default, f"{terms[0]},{terms[1]}->{terms[2]}", [a, b])


def _can_take(*operands: Any) -> bool:
    """Whether operands are DTensors that have a product here."""
    if functorch_level() is not None:
        return False
    first = None
    for operand in operands:
        if not isinstance(operand, DTensor):
            return False
        own = operand._tensor_layout
        first = first or own
        if own.comm is not first.comm or own.dtype is not first.dtype:
            return False
    return first is not None and first.dtype.is_floating_point


def _cast(*operands: Any) -> tuple[Any, ...]:
    """The operands as autocast would give them to a product."""
    if not is_any_autocast_enabled():
        return operands
    return tuple(
        t.to(torch.get_autocast_dtype(t.device.type))
        if isinstance(t, torch.Tensor)
        and torch.is_autocast_enabled(t.device.type)
        and t.is_floating_point()
        and t.dtype is not torch.float64
        else t
        for t in operands
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, weight: DTensor, bias: DTensor | None) -> DTensor:
        # A frozen weight's gradient is not asked for, so x is not kept: it may be freed, or written to.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.set_materialize_grads(False)
        return run_below_autograd(aten.linear.default, x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        (grad,), needs = grads, list(ctx.needs_input_grad)
        if grad is None:
            return None, None, None
        if not torch.is_grad_enabled() and needs[1]:
            return run_below_autograd(aten.linear_backward.default, x, grad, weight, needs)
        # A second derivative is asked for, or the weight is frozen: by ops.
        batch = list(range(grad.ndim - 1))
        return (
            grad.matmul(weight) if needs[0] else None,
            torch.tensordot(grad, x, (batch, batch)) if needs[1] else None,  # pyright: ignore[reportArgumentType]
            (grad.sum(batch) if batch else grad) if needs[2] else None,
        )


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: DTensor, b: DTensor) -> DTensor:
        # A factor is kept for the other's gradient only: else it may be freed, or written to.
        ctx.save_for_backward(a if ctx.needs_input_grad[1] else None, b if ctx.needs_input_grad[0] else None)
        ctx.shapes = a.shape, b.shape
        ctx.set_materialize_grads(False)
        return run_below_autograd(aten.matmul.default, a, b)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        a, b = ctx.saved_tensors
        (grad,), needs = grads, list(ctx.needs_input_grad)
        if grad is None:
            return None, None
        if not torch.is_grad_enabled() and all(needs):
            return run_below_autograd(aten.matmul_backward.default, grad, a, b, needs)
        first, second = ctx.shapes
        return (
            matmul_first_gradient(grad, first, b) if needs[0] else None,
            matmul_second_gradient(grad, a, second) if needs[1] else None,
        )


class _Einsum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, terms: tuple[str, str, str], a: DTensor, b: DTensor) -> DTensor:
        _, needs_a, needs_b = ctx.needs_input_grad
        ctx.save_for_backward(a if needs_b else None, b if needs_a else None)
        ctx.terms = terms
        ctx.set_materialize_grads(False)
        return _run_einsum(terms, a, b)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        a, b = ctx.saved_tensors
        (grad,), (_, needs_a, needs_b) = grads, ctx.needs_input_grad
        if grad is None:
            return None, None, None
        first, second, result = ctx.terms
        return (
            None,
            torch.einsum(f"{result},{second}->{first}", grad, b) if needs_a else None,
            torch.einsum(f"{first},{result}->{second}", a, grad) if needs_b else None,
        )


# `apply` without its question whether a transform is active, which `_can_take` has asked.
_apply_linear, _apply_matmul, _apply_einsum = (
    super(torch.autograd.Function, step).apply  # pyright: ignore[reportAttributeAccessIssue]
    for step in (_Linear, _Matmul, _Einsum)
)


def backward(tensor: DTensor, gradient: Any = None, **options: Any) -> None:
    """Tensor.backward."""
    torch.autograd.backward(tensor, gradient, **options)


def grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any,
    is_grads_batched: bool,
    materialize_grads: bool,
    **options: Any,
) -> Any:
    """torch.autograd.grad, which hands itself over where a tensor has functions of its own; an edge has none."""
    if is_grads_batched:
        with no_subclass_functions():
            return torch.autograd.grad(
                outputs,
                inputs,
                grad_outputs,
                is_grads_batched=True,
                materialize_grads=materialize_grads,
                **options,
            )
    given = (None,) * len(outputs) if grad_outputs is None else grad_outputs
    given = (given,) if isinstance(given, torch.Tensor) else given
    starts = [
        torch.ones_like(y) if g is None and isinstance(y, torch.Tensor) and y.numel() == 1 else g
        for y, g in zip(outputs, given, strict=True)
    ]
    options["allow_unused"] = options["allow_unused"] or materialize_grads
    found = torch.autograd.grad(list(map(_edge, outputs)), list(map(_edge, inputs)), starts, **options)
    if not materialize_grads:
        return found
    return tuple([torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)])


def _edge(value: Any) -> GradientEdge:
    return get_gradient_edge(value) if isinstance(value, torch.Tensor) else value


def detach(tensor: Any) -> Any:
    """Of the same class as the tensor: nn.Parameter asks for that."""
    result = tensor.detach()
    result.__class__ = tensor.__class__
    return result


def take_weight(module: nn.Module, name: str, parameter: Any) -> None:
    """A hook of torch, called as `module` gets a parameter: the products of a linear layer run as one op."""
    if isinstance(module, nn.Linear) and name == "weight" and isinstance(parameter, DTensor):
        parameter.__class__ = Factor


def module_attention(*args: Any, **kwargs: Any) -> Any:
    """F.multi_head_attention_forward as it is; a plain mask among its ops is known to be one."""
    token = in_module_attention.set(True)
    try:
        return F.multi_head_attention_forward(*args, **kwargs)
    finally:
        in_module_attention.reset(token)


WHOLE: dict[Function, Function] = {
    F.linear: linear,
    torch.matmul: matmul,
    torch.Tensor.matmul: matmul,
    torch.Tensor.__matmul__: matmul,
    torch.einsum: einsum,
    F.multi_head_attention_forward: module_attention,
    torch.Tensor.detach: detach,
}
OPEN: dict[Function, Function] = {torch.Tensor.backward: backward, torch.autograd.grad: grad}


def call(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """`__torch_function__` of tensors whose products run as one op."""
    take = WHOLE.get(func)
    if take is None and func in OPEN:
        return OPEN[func](*args, **(kwargs or {}))
    with no_subclass_functions():
        if take is not None and not torch.compiler.is_dynamo_compiling():
            result = take(*args, **kwargs) if kwargs else take(*args)
            if result is not NotImplemented:
                return result
        return func(*args, **kwargs) if kwargs else func(*args)
