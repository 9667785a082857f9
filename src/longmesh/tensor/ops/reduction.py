"""Reductions over sharded dims that need more than one local call: spreads, norms with a root, log-sum-exp.

var     mean of the whole first, then the sum of squared deviations: two small all-reduces, stable
norm    sum of p-th powers over the ranks, then one root
"""

from __future__ import annotations

import math
from typing import Any

import torch

from longmesh._torch import OpOverload, aten, schema_of
from longmesh.spec import Partial
from longmesh.tensor.make_plan import Family
from longmesh.tensor.op_facts import bind
from longmesh.tensor.ops.pieces import (
    as_dims,
    reduced_layout,
    reduced_shape,
    sharding_axes,
    stand_in,
    wide_dtype,
)
from longmesh.tensor.planned import Planned
from longmesh.tensor.planner import USUAL, Planner
from longmesh.tensor.tree import map_tensors


def variance(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """var, std, var_mean, std_mean."""
    given = bind(func, args, kwargs)
    x: Planned = given["self"]
    dims = as_dims(given["dim"], x.ndim)
    if not sharding_axes(x._layout, dims) or not (x.is_floating_point() or x.is_complex()):
        return USUAL
    correction = 1 if given["correction"] is None else given["correction"]
    dtype, keepdim = x.dtype, given["keepdim"]
    wide = p.reduced(x).to(wide_dtype(dtype))
    mean = p.reduced(wide.mean(dims, keepdim=True))
    distance = wide - mean
    squares = distance.abs().square() if x.is_complex() else distance.square()
    degrees = max(math.prod(x.shape[d] for d in dims) - correction, 0)
    total = squares.sum(dims, keepdim=keepdim)
    # A pending sum must not be divided by zero term by term.
    result = (total if degrees else p.reduced(total)) / degrees
    if schema_of(func).name in ("aten::std", "aten::std_mean"):
        result = result.sqrt()
    result = result.to(dtype.to_real())
    if len(schema_of(func).returns) == 1:
        return result
    mean = mean if keepdim else mean.reshape(reduced_shape(x.shape, dims, False))
    return result, mean.to(dtype)


def vector_norm(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """(sum |x|^p)^(1/p): each rank its own norm to the power p, pending; the root is taken of the whole."""
    given = bind(func, args, kwargs)
    x: Planned = given["self"]
    order = float(given["ord"])
    dims = as_dims(given["dim"], x.ndim)
    if order in (0, 1) or math.isinf(order) or not x.numel() or not sharding_axes(x._layout, dims):
        return USUAL
    x = p.reduced(x)
    dtype, keepdim = given["dtype"] or x.dtype, given["keepdim"]
    wide = wide_dtype(dtype)

    def powers(local: torch.Tensor) -> torch.Tensor:
        norm = func(stand_in(local, dims), order, list(dims), keepdim, dtype=wide)
        return norm.pow(order) if math.prod(local.shape[d] for d in dims) else torch.zeros_like(norm)

    shape = reduced_shape(x.shape, dims, keepdim)
    layout = reduced_layout(x._layout, dims, keepdim, Partial())
    total = p.wrap(p.local(powers, x), x, layout=layout, shape=shape, dtype=wide.to_real())
    return p.reduced(total).pow(1 / order).to(dtype.to_real())


def log_sum_exp(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The maximum of the whole, then the sum of what is left: two small all-reduces."""
    given = bind(func, args, kwargs)
    x: Planned = given["self"]
    dims = as_dims(given["dim"], x.ndim)
    if not x.numel() or not sharding_axes(x._layout, dims) or x.is_complex():
        return USUAL
    dtype = x.dtype if x.is_floating_point() else torch.get_default_dtype()
    wide = p.reduced(x).to(wide_dtype(dtype))
    top = p.reduced(wide.amax(dims, keepdim=True))
    top = top.masked_fill(top.abs() == math.inf, 0.0)
    result = p.reduced((wide - top).exp().sum(dims, keepdim=True)).log() + top
    result = result if given["keepdim"] else result.reshape(reduced_shape(x.shape, dims, False))
    return result.to(dtype)


def reduce_once(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """scatter_reduce and index_reduce: a pending sum is reduced once, and remembered for the gradient.

    That goes to the elements that equal the result, bit for bit, and reads the operands a second time. Two reductions
    of one pending sum may add in different orders.
    """
    args, kwargs = map_tensors(p.reduced_for_good, (args, kwargs))
    return p.by_rule(func, args, kwargs)


FAMILIES: dict[OpOverload, Family] = {
    **dict.fromkeys(
        (aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction),
        variance,
    ),
    aten.linalg_vector_norm.default: vector_norm,
    aten.logsumexp.default: log_sum_exp,
    **dict.fromkeys((aten.scatter_reduce.two, aten.index_reduce.default), reduce_once),
}
