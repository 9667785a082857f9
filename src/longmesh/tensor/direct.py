"""The direct path: an operator runs its known plan at once, without asking torch.

    x + y   torch:  parse, autograd keys, __torch_dispatch__, plan, local call, wrap
            here:   plan, local call, wrap

Taken only where nobody would notice: no input needs a gradient, no mode, transform or autocast is active, and the plan
was made before (by torch's way) and is a plain local call. Going through torch and handing the result back costs more
than adding two small tensors. No views: they share their base's version counter, which torch alone can set up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from longmesh._torch import (
    OpOverload,
    aten,
    dispatch_mode_count,
    function_mode_count,
    functorch_level,
    increment_version,
    is_any_autocast_enabled,
)
from longmesh.tensor.bound_plan import BoundOutput, BoundPlan, wrap
from longmesh.tensor.dispatch import dispatch
from longmesh.tensor.dtensor import DTensor
from longmesh.tensor.op_key import describe, describe_named

Method = Callable[..., Any]

_is_grad_enabled = torch.is_grad_enabled


def _output(plan: Any) -> BoundOutput | None:
    """What a known plain plan gives; None where it is another one, or somebody would see the op."""
    if (
        type(plan) is not BoundPlan
        or plan.known is None
        or dispatch_mode_count()
        or function_mode_count()
        or is_any_autocast_enabled()
        or functorch_level() is not None
    ):
        return None
    return plan.single


def _binary(op: OpOverload, by_torch: Method) -> Method:
    """The method of an operator on two DTensors, or on one and a number."""
    tables, number = dispatch.tables, id(op)

    def method(self: Any, other: Any) -> Any:
        kind = type(other)
        own = self._tensor_layout
        if kind is DTensor:
            if _is_grad_enabled() and (self.requires_grad or other.requires_grad):
                return by_torch(self, other)
            seen, part = other._tensor_layout, other._local_tensor
        elif kind is float or kind is int:
            if _is_grad_enabled() and self.requires_grad:
                return by_torch(self, other)
            seen, part = float if kind is float else other, other  # as `describe` has numbers
        else:
            return by_torch(self, other)
        plan = own.plans.get((tables.get(number), own, seen))
        output = _output(plan)
        return by_torch(self, other) if output is None else wrap(plan.plain(self._local_tensor, part), output)

    return method


def _matmul(self: Any, other: Any) -> Any:
    """`self @ other` of two matrices."""
    if type(other) is DTensor and not (_is_grad_enabled() and (self.requires_grad or other.requires_grad)):
        own, seen = self._tensor_layout, other._tensor_layout
        plan = own.plans.get((dispatch.tables.get(_MM), own, seen))  # only matrices have one
        output = _output(plan)
        if output is not None:
            return wrap(plan.plain(self._local_tensor, other._local_tensor), output)
    return torch.Tensor.matmul(self, other)


_MM = id(aten.mm.default)


def _unary(op: OpOverload, by_torch: Method) -> Method:
    """The method of an op on one DTensor."""
    tables, number = dispatch.tables, id(op)

    def method(self: Any) -> Any:
        if _is_grad_enabled() and self.requires_grad:
            return by_torch(self)
        plan = self._tensor_layout.plans.get((tables.get(number), ()))
        output = _output(plan)
        return by_torch(self) if output is None else wrap(plan.plain(self._local_tensor), output)

    return method


def _reduction(op: OpOverload, by_torch: Method) -> Method:
    """The method of a reduction over one dim, which may keep it."""
    tables, number = dispatch.tables, id(op)

    def method(self: Any, *args: Any, **options: Any) -> Any:
        rest = args[1:]
        if (
            args
            and type(args[0]) is int
            and (not rest or type(rest[0]) is bool)
            and not options
            and not (_is_grad_enabled() and self.requires_grad)
        ):
            plan = self._tensor_layout.plans.get((tables.get(number), args[:1], rest))
            output = _output(plan)
            if output is not None:
                return wrap(plan.plain(self._local_tensor, *args), output)
        return by_torch(self, *args, **options)

    return method


def _in_place(op: OpOverload, by_torch: Method) -> Method:
    """The method of an op that writes to the DTensor it is called on."""
    number = id(op)

    def method(self: Any, *args: Any, **options: Any) -> Any:
        if _is_grad_enabled() or not _write(number, (self, *args), options):
            return by_torch(self, *args, **options)
        return self

    return method


def _write(number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Run a known plain plan of an op that writes to its first argument; False where it was not done."""
    table = dispatch.tables.get(number)
    if (
        table is None
        or dispatch_mode_count()
        or function_mode_count()
        or is_any_autocast_enabled()
        or functorch_level() is not None
        or torch.is_inference_mode_enabled()
    ):
        return False
    parts: list[Any] = [table]
    local_args = [describe(value, parts, table.reads_floats) for value in args]
    local_kwargs = describe_named(kwargs, parts, table.reads_floats) if kwargs else {}
    try:
        plan = args[0]._tensor_layout.plans.get(tuple(parts))
    except TypeError:  # symbolic sizes don't hash
        return False
    if type(plan) is not BoundPlan or plan.plain is None or plan.written != 0:
        return False
    plan.plain(*local_args, **local_kwargs)
    increment_version(args[:1])
    return True


METHODS: dict[str, Method] = {
    "__add__": _binary(aten.add.Tensor, torch.Tensor.__add__),
    "__radd__": _binary(aten.add.Tensor, torch.Tensor.__add__),
    "__mul__": _binary(aten.mul.Tensor, torch.Tensor.__mul__),
    "__rmul__": _binary(aten.mul.Tensor, torch.Tensor.__mul__),
    "__sub__": _binary(aten.sub.Tensor, torch.Tensor.__sub__),
    "__truediv__": _binary(aten.div.Tensor, torch.Tensor.__truediv__),
    "__matmul__": _matmul,
    "sqrt": _unary(aten.sqrt.default, torch.Tensor.sqrt),
    "sum": _reduction(aten.sum.dim_IntList, torch.Tensor.sum),
    "mean": _reduction(aten.mean.dim, torch.Tensor.mean),
    # What optimizers write with.
    "add_": _in_place(aten.add_.Tensor, torch.Tensor.add_),
    "mul_": _in_place(aten.mul_.Tensor, torch.Tensor.mul_),
    "lerp_": _in_place(aten.lerp_.Scalar, torch.Tensor.lerp_),
    "addcmul_": _in_place(aten.addcmul_.default, torch.Tensor.addcmul_),
    "addcdiv_": _in_place(aten.addcdiv_.default, torch.Tensor.addcdiv_),
}
