"""Arithmetic without torch's dispatcher: where nothing above a DTensor would see the op, its plan runs at once.

    x + y      no gradient, no mode, no transform, no autocast  ->  the plan of add.Tensor on the local parts
               otherwise, and for a call whose like was not seen  ->  torch, which comes back through `dispatch`
    x.mul_(y)  the same where gradients are off, as in an optimizer's step

Entering `__torch_dispatch__` and handing the result back costs more than adding two small tensors. No views: they share
their base's version counter, which torch alone can set up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from longmesh._torch import (
    OpOverload,
    dispatch_mode_count,
    function_mode_count,
    functorch_level,
    is_any_autocast_enabled,
)

Method = Callable[..., Any]


def no_active_modes() -> bool:
    """Whether nobody stands between the user and the op: no mode, transform or autocast."""
    return not (
        dispatch_mode_count()
        or function_mode_count()
        or is_any_autocast_enabled()
        or functorch_level() is not None
    )


def binary(op: OpOverload, by_torch: Method) -> Method:
    """The method of an operator on two DTensors, or on one and a number."""

    def method(self: Any, other: Any) -> Any:
        kind = type(other)
        if kind is type(self):
            if torch.is_grad_enabled() and (self.requires_grad or other.requires_grad):
                return by_torch(self, other)
            key, part = (self._tensor_layout, other._tensor_layout), other._local_tensor
        elif kind is float or kind is int:
            if torch.is_grad_enabled() and self.requires_grad:
                return by_torch(self, other)
            key, part = (
                (self._tensor_layout, float if kind is float else other),
                other,
            )  # as `describe` has numbers
        else:
            return by_torch(self, other)
        result = self._run_known(op, key, (self._local_tensor, part))
        return by_torch(self, other) if result is None else result

    return method


def matmul(self: Any, other: Any) -> Any:
    """`self @ other` of two matrices."""
    if (
        type(other) is not type(self)
        or not self.ndim == other.ndim == 2
        or (torch.is_grad_enabled() and (self.requires_grad or other.requires_grad))
    ):
        return torch.Tensor.matmul(self, other)
    key, parts = (self._tensor_layout, other._tensor_layout), (self._local_tensor, other._local_tensor)
    result = self._run_known(torch.ops.aten.mm.default, key, parts)
    return torch.Tensor.matmul(self, other) if result is None else result


def unary(op: OpOverload, by_torch: Method) -> Method:
    """The method of an op on one DTensor."""

    def method(self: Any) -> Any:
        if torch.is_grad_enabled() and self.requires_grad:
            return by_torch(self)
        result = self._run_known(op, (self._tensor_layout,), (self._local_tensor,))
        return by_torch(self) if result is None else result

    return method


def in_place(op: OpOverload, by_torch: Method) -> Method:
    """The method of an op that writes to the DTensor it is called on."""

    def method(self: Any, *args: Any, **options: Any) -> Any:
        if torch.is_grad_enabled() or not self._write_known(op, (self, *args), options):
            return by_torch(self, *args, **options)
        return self

    return method
