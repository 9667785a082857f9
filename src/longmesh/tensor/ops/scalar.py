"""Ops that no rule describes: they ask about values, not layouts."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from longmesh.spec import Layout
from longmesh.tensor.autograd import move
from longmesh.tensor.dispatch import Handler

aten = torch.ops.aten


def to_scalar(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """item(), float(), bool(): reduced and gathered first, so every rank gets the same number."""
    tensor = args[0]
    return func(move(tensor, Layout.replicated(tensor._layout.mesh))._local_tensor)


def is_same_size(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return args[0].shape == args[1].shape


def equal(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """torch.equal: one answer on all ranks."""
    left, right = args
    if left.shape != right.shape:
        return False
    return bool((left == right).all()) if left.numel() else True


def allclose(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """torch.allclose: one answer on all ranks."""
    return bool(torch.isclose(*args, **kwargs).all())


HANDLERS: dict[OpOverload, Handler] = {
    aten._local_scalar_dense.default: to_scalar,
    aten.item.default: to_scalar,
    aten.is_same_size.default: is_same_size,
    aten.equal.default: equal,
    aten.allclose.default: allclose,
}
