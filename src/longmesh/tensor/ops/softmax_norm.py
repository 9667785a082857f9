"""Softmax and layer norm over a sharded dim: two small all-reduces instead of a gather of the dim.

    softmax      maximum of the whole, then the sum of exponentials
    layer norm   mean of the whole, then the mean of squared deviations

A reduction over the sharded dim is pending, and small enough to be reduced at once.
Half precision is computed in float32, as torch's kernels do.
"""

from __future__ import annotations

from typing import Any

import torch

from longmesh._torch import OpOverload, aten
from longmesh.tensor.make_plan import Family
from longmesh.tensor.ops.pieces import as_dims, sharding_axes, wide_dtype
from longmesh.tensor.planned import Planned
from longmesh.tensor.planner import USUAL, Planner


def widened(p: Planner, tensor: Any) -> torch.Tensor:
    whole = p.reduced(tensor)
    return whole.to(wide_dtype(whole.dtype))


def softmax(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """_softmax and _log_softmax."""
    x, dim, half_to_float = args
    dims = as_dims(dim, x.ndim)
    if not x.numel() or not sharding_axes(x._layout, dims) or not x.is_floating_point():
        return USUAL
    dtype = torch.float32 if half_to_float else x.dtype
    wide = widened(p, x)
    shifted = wide - p.reduced(wide.amax(dims, keepdim=True))
    if func is aten._log_softmax.default:
        return (shifted - p.reduced(shifted.exp().sum(dims, keepdim=True)).log()).to(dtype)
    powers = shifted.exp()
    return (powers / p.reduced(powers.sum(dims, keepdim=True))).to(dtype)


def softmax_backward(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """_softmax_backward_data and _log_softmax_backward_data."""
    grad, output, dim, input_dtype = args
    dims = as_dims(dim, output.ndim)
    if not output.numel() or not sharding_axes(output._layout, dims) or not output.is_floating_point():
        return USUAL
    grad, output = widened(p, grad), widened(p, output)
    if func is aten._log_softmax_backward_data.default:
        return (grad - output.exp() * p.reduced(grad.sum(dims, keepdim=True))).to(input_dtype)
    product = grad * output
    return (product - output * p.reduced(product.sum(dims, keepdim=True))).to(input_dtype)


def layer_norm(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """native_layer_norm(input, normalized_shape, weight?, bias?, eps) -> output, mean, rstd."""
    x, normalized, weight, bias, eps = args
    dims = _normalized_dims(x, normalized)
    if not dims or not x.numel() or not sharding_axes(x._layout, dims):
        return USUAL
    wide = widened(p, x)
    mean = p.reduced(wide.mean(dims, keepdim=True))
    centred = wide - mean
    rstd = p.reduced(centred.square().mean(dims, keepdim=True) + eps).rsqrt()
    output = centred * rstd
    if weight is not None:
        output = output * weight
    if bias is not None:
        output = output + bias
    kept = x.dtype if weight is None or weight.dtype is x.dtype else torch.float32
    return output.to(x.dtype), mean.to(kept), rstd.to(kept)


def layer_norm_backward(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """native_layer_norm_backward(grad_out, input, normalized_shape, mean, rstd, weight?, bias?, output_mask)."""
    grad, x, normalized, mean, rstd, weight, bias, mask = args
    dims = _normalized_dims(x, normalized)
    if not dims or not x.numel() or not sharding_axes(x._layout, dims):
        return USUAL
    grad, wide = widened(p, grad), widened(p, x)
    unit = (wide - mean) * rstd
    results: list[Any] = [None, None, None]
    if mask[0]:
        scaled = grad if weight is None else grad * weight
        along = p.reduced(scaled.mean(dims, keepdim=True))
        across = p.reduced((scaled * unit).mean(dims, keepdim=True))
        results[0] = ((scaled - along - unit * across) * rstd).to(x.dtype)
    rows = list(range(dims[0]))
    for i, term, parameter in ((1, grad * unit, weight), (2, grad, bias)):
        if mask[i] and parameter is not None:
            results[i] = (term.sum(rows) if rows else term).to(parameter.dtype)
    return tuple(results)


def _normalized_dims(x: Planned, normalized: Any) -> tuple[int, ...]:
    """The trailing dims that are normalised together; none where torch is to say what is wrong."""
    if tuple(x.shape[x.ndim - len(normalized) :]) != tuple(normalized):
        return ()
    return tuple(range(x.ndim - len(normalized), x.ndim))


FAMILIES: dict[OpOverload, Family] = {
    aten._softmax.default: softmax,
    aten._log_softmax.default: softmax,
    aten._softmax_backward_data.default: softmax_backward,
    aten._log_softmax_backward_data.default: softmax_backward,
    aten.native_layer_norm.default: layer_norm,
    aten.native_layer_norm_backward.default: layer_norm_backward,
}
