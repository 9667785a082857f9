"""Dropout and its kin: ops that are random and differentiable."""

from __future__ import annotations

from typing import Any

import torch

from longmesh._torch import OpOverload, aten
from longmesh.spec import Partial
from longmesh.tensor import distributions
from longmesh.tensor.make_plan import Family
from longmesh.tensor.op_facts import bind
from longmesh.tensor.ops.random import draw_like, overwrite
from longmesh.tensor.planner import Planner


def native_dropout(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Linear in its input, so a pending sum stays pending under the mask."""
    given = bind(func, args, kwargs)
    x, odds, train = given["input"], given["p"], given["train"]
    linear = all(q.reduce_op in ("sum", "avg") for q in x._layout.placements if isinstance(q, Partial))
    x = x if linear else p.reduced(x)
    keep = 1.0 if train is False else 1.0 - odds
    mask = draw_like(p, x, distributions.bernoulli(keep), dtype=torch.bool)
    scale = 0.0 if keep == 0 else 1.0 / keep
    return p.wrap(p.local(lambda local, mask: local * mask * scale, x, mask), x), mask


def native_dropout_backward(
    p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    grad, mask, scale = args
    return grad * mask * scale


def rrelu_with_noise(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A random slope for each negative element, kept in `noise` for the backward."""
    given = bind(func, args, kwargs)
    x, lower, upper = given["self"], float(given["lower"]), float(given["upper"])
    if not given["training"]:
        out = torch.nn.functional.leaky_relu(x, (lower + upper) / 2)
    else:
        slope = draw_like(p, x, distributions.uniform(x.dtype, lower, upper), given["generator"])
        noise = torch.where(x <= 0, slope, torch.ones_like(slope))
        overwrite(p, given["noise"], noise)
        out = x * noise
    return overwrite(p, x, out) if func is aten.rrelu_with_noise_.default else out


FAMILIES: dict[OpOverload, Family] = {
    aten.native_dropout.default: native_dropout,
    aten.native_dropout_backward.default: native_dropout_backward,
    aten.rrelu_with_noise.default: rrelu_with_noise,
    aten.rrelu_with_noise_.default: rrelu_with_noise,
}
