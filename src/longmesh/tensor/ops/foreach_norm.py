"""Norms of lists of tensors: a local norm each, and one small collective for all that are cut alike.

What travels is one number per tensor (its local norm to the power p, in double precision) and a flag for NaN,
which minima and maxima would lose. A rank with an empty part takes part with the norm of nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from longmesh.spec import Layout, Partial, Placement, Replicate, Shard
from longmesh.tensor.autograd import gradient_layout, move
from longmesh.tensor.dispatch import Handler
from longmesh.tensor.dtensor import DTensor

aten = torch.ops.aten


def foreach_norm(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """_foreach_norm and _foreach_powsum. Collective where a tensor is cut or pending."""
    tensors = [_reduced(t) for t in args[0]]
    order = float(args[1] if len(args) > 1 else kwargs.get("ord", 2))
    parts = [_part(t, order) for t in tensors]
    results = list(func(parts, *args[1:], **kwargs))
    for members in _cut_alike(tensors):
        first = tensors[members[0]]
        assert isinstance(first, DTensor)
        has_root = func is aten._foreach_norm.Scalar
        values = _combine([results[i] for i in members], first, order, has_root)
        for i, value in zip(members, values.unbind(), strict=True):
            results[i] = value.to(results[i].dtype)
    return [_replicated(t, result) for t, result in zip(tensors, results, strict=True)]


def _reduced(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor) and tensor._layout.partial_axes:
        return move(tensor, gradient_layout(tensor._layout))
    return tensor


def _part(tensor: torch.Tensor, order: float) -> torch.Tensor:
    """This rank's part; one number that adds nothing in place of an empty one."""
    if not isinstance(tensor, DTensor):
        return tensor
    local = tensor._local_tensor
    if local.numel() or not tensor.numel():
        return local
    return local.new_full((1,), 0.0 if order >= 0 else math.inf)


def _cut_alike(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """The indices of the tensors that are cut, by mesh and cutting axes."""
    groups: dict[Any, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if isinstance(tensor, DTensor) and tensor._layout.shard_dims:
            axes = tuple(isinstance(p, Shard) for p in tensor._layout.placements)
            groups.setdefault((tensor._tensor_layout.comm, axes), []).append(i)
    return list(groups.values())


def _combine(norms: list[torch.Tensor], like: DTensor, order: float, has_root: bool) -> torch.Tensor:
    """One number per tensor from every rank's. Collective over the axes that cut `like`."""
    values = torch.stack(norms).double()
    if math.isinf(order):
        pending = Partial("max" if order > 0 else "min")
        flags = values.isnan().double() * (1 if order > 0 else -1)
        values, flags = _reduce(
            torch.stack([values.nan_to_num(nan=0.0, posinf=math.inf), flags]), like, pending
        )
        return torch.where(flags != 0, math.nan, values)
    if not has_root or order == 0:
        return _reduce(values, like, Partial())
    return _reduce(values**order, like, Partial()) ** (1 / order)


def _reduce(values: torch.Tensor, like: DTensor, pending: Partial) -> torch.Tensor:
    whole: Placement = Replicate()
    places = [pending if isinstance(p, Shard) else whole for p in like._layout.placements]
    terms = DTensor(values, like._mesh, Layout(like._layout.mesh, places), values.shape, values.stride())
    return move(terms, Layout.replicated(like._layout.mesh))._local_tensor


def _replicated(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return value
    return DTensor(value, tensor._mesh, Layout.replicated(tensor._layout.mesh), (), ())


HANDLERS: dict[OpOverload, Handler] = {
    aten._foreach_norm.Scalar: foreach_norm,
    aten._foreach_powsum.Scalar: foreach_norm,
}
