"""Dropout and its kin: ops that are random and differentiable."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from longmesh.spec import Partial
from longmesh.tensor import distributions
from longmesh.tensor.dispatch import Handler
from longmesh.tensor.dtensor import DTensor
from longmesh.tensor.meta import global_stride
from longmesh.tensor.ops.pieces import bind, reduced
from longmesh.tensor.ops.random import draw_like, overwrite
from longmesh.tensor.random import next_key

aten = torch.ops.aten


def native_dropout(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Linear in its input, so a pending sum stays pending under the mask."""
    given = bind(func, args, kwargs)
    x, p, train = given["input"], given["p"], given["train"]
    linear = all(q.reduce_op in ("sum", "avg") for q in x.placements if isinstance(q, Partial))
    x = x if linear else reduced(x)
    keep = 1.0 if train is False else 1.0 - p
    key = next_key()
    mask = draw_like(x, distributions.bernoulli(keep), key, dtype=torch.bool)
    scale = 0.0 if keep == 0 else 1.0 / keep
    local = x._local_tensor * mask._local_tensor * scale
    return DTensor(local, x._mesh, x._layout, x.shape, global_stride(x.shape, local)), mask


def native_dropout_backward(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad, mask, scale = args
    return grad * mask * scale


def rrelu_with_noise(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A random slope for each negative element, kept in `noise` for the backward."""
    given = bind(func, args, kwargs)
    x, lower, upper = given["self"], float(given["lower"]), float(given["upper"])
    if not given["training"]:
        out = torch.nn.functional.leaky_relu(x, (lower + upper) / 2)
    else:
        slope = draw_like(x, distributions.uniform(x.dtype, lower, upper), next_key(given["generator"]))
        noise = torch.where(x <= 0, slope, torch.ones_like(slope))
        overwrite(given["noise"], noise)
        out = x * noise
    return overwrite(x, out) if func is aten.rrelu_with_noise_.default else out


HANDLERS: dict[OpOverload, Handler] = {
    aten.native_dropout.default: native_dropout,
    aten.native_dropout_backward.default: native_dropout_backward,
    aten.rrelu_with_noise.default: rrelu_with_noise,
    aten.rrelu_with_noise_.default: rrelu_with_noise,
}
