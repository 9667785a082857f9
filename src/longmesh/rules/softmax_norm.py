"""Softmax and normalisation: what is normalised together must be whole, everything else may be sharded.

    layer_norm       the leading dims; gradients of weight and bias are pending sums
    group_norm       the batch; also channels, where every rank gets whole groups

Where the normalised dims are sharded, programs work with small all-reduces instead:

    softmax          maximum of the whole, then the sum of exponentials
    layer norm       mean of the whole, then the mean of squared deviations

There half precision is computed in float32, as torch's kernels do. Batch norm is decomposed: its statistics are means
over sharded dims.
"""

from __future__ import annotations

from typing import Any

import torch

from longmesh._torch import OpOverload, aten
from longmesh.rules.pieces import as_dims, sharding_axes, wide_dtype
from longmesh.rules.planned import Planned
from longmesh.rules.rule import (
    AxisRule,
    LocalView,
    Meta,
    OpCall,
    OutMeta,
    P,
    R,
    Rule,
    S,
    contiguous,
    like,
    line,
    same_shape,
)
from longmesh.rules.view import along_others
from longmesh.rules.writer import Writer
from longmesh.spec import Placement


def softmax_backward_lines(call: OpCall) -> list[AxisRule]:
    """Linear in the gradient."""
    dim = call.dim()
    sharded = [line([S(d), S(d)], S(d)) for d in range(call.tensors[0].ndim) if d != dim]
    return [*sharded, line([P, R], P)]


def leading_dims(call: OpCall) -> range:
    """The dims of the input that layer norm does not normalise."""
    return range(call["input"].ndim - len(call["normalized_shape"]))


def layer_norm_lines(call: OpCall) -> list[AxisRule]:
    parameters = [R] * (len(call.tensors) - 1)
    return [line([S(d), *parameters], [S(d)] * len(call.outputs)) for d in leading_dims(call)]


def layer_norm_meta(call: OpCall) -> tuple[OutMeta, ...]:
    shape, count = call["input"].shape, len(leading_dims(call))
    row = contiguous([n if d < count else 1 for d, n in enumerate(shape)])
    return (contiguous(shape), *[row] * (call.num_returns - 1))


def layer_norm_backward_lines(call: OpCall) -> list[AxisRule]:
    """Statistics are laid out as the rows; a gradient of weight or bias is a sum over rows."""
    rows = [call.get(name) for name in ("grad_out", "input", "mean", "rstd")]
    row_indices = [meta.index for meta in rows if meta is not None]
    return [
        line(
            [S(d) if i in row_indices else R for i in range(len(call.tensors))],
            _gradients(call, S(d), P),
        )
        for d in leading_dims(call)
    ]


def _gradients(call: OpCall, of_input: Placement, of_parameter: Placement) -> list[Placement]:
    """Placements of the gradients that are asked for."""
    wanted = [of_input, *[of_parameter] * (len(call["output_mask"]) - 1)]
    return [p for p, asked in zip(wanted, call["output_mask"], strict=True) if asked]


def layer_norm_backward_meta(call: OpCall) -> tuple[OutMeta, ...]:
    shape, parameter = call["input"].shape, call["normalized_shape"]
    metas = [contiguous(shape), *[contiguous(parameter)] * (len(call["output_mask"]) - 1)]
    return tuple(m for m, asked in zip(metas, call["output_mask"], strict=True) if asked)


def group_norm_lines(call: OpCall) -> list[AxisRule]:
    """native_group_norm(input, weight?, bias?, N, C, HxW, group, eps) -> out, mean, rstd."""
    parameters = len(call.tensors) - 1
    return [
        line([S(0), *[R] * parameters], [S(0)] * 3),
        line([S(1), *[S(0)] * parameters], [S(1)] * 3, even=((-2, 1),)),  # whole groups
    ]


def group_norm_meta(call: OpCall) -> tuple[OutMeta, ...]:
    statistics = contiguous((call["N"], call["group"]))
    return _like_kernel(call["input"]), statistics, statistics


def group_norm_backward_meta(call: OpCall) -> tuple[OutMeta, ...]:
    parameter = contiguous((call["C"],))
    metas = [_like_kernel(call["input"]), parameter, parameter]
    return tuple(m for m, asked in zip(metas, call["output_mask"], strict=True) if asked)


def _like_kernel(meta: Meta) -> OutMeta:
    """Channels last where the input is, else contiguous."""
    if meta.ndim in (4, 5) and meta.shape[1] > 1 and meta.stride[1] == 1:
        return like(meta)
    return contiguous(meta.shape)


def group_norm_backward_lines(call: OpCall) -> list[AxisRule]:
    """native_group_norm_backward(grad_out, input, mean, rstd, weight?, N, C, HxW, group, output_mask)."""
    weight = [R] * (len(call.tensors) - 4)
    return [
        line([S(0)] * 4 + weight, _gradients(call, S(0), P)),
        line(
            [S(1)] * 4 + [S(0) for _ in weight],
            _gradients(call, S(1), S(0)),
            even=((2, 1),),  # whole groups
        ),
    ]


def group_norm_args(call: OpCall, view: LocalView) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The sizes N, C and the number of groups of this rank's part."""
    batch, channels = view.input_shapes[0][:2]
    return call.changed(N=batch, C=channels, group=call["group"] * channels // call["C"])


# -- over a sharded dim: two small all-reduces instead of a gather of the dim ----------------------


def widened(p: Writer, tensor: Any) -> torch.Tensor:
    whole = p.reduced(tensor)
    return whole.to(wide_dtype(whole.dtype))


def softmax(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """_softmax and _log_softmax."""
    x, dim, half_to_float = args
    dims = as_dims(dim, x.ndim)
    if not x.numel() or not sharding_axes(x.global_layout, dims) or not x.is_floating_point():
        return p.by_lines(func, args, kwargs)
    dtype = torch.float32 if half_to_float else x.dtype
    wide = widened(p, x)
    shifted = wide - p.reduced(wide.amax(dims, keepdim=True))
    if func is aten._log_softmax.default:
        return (shifted - p.reduced(shifted.exp().sum(dims, keepdim=True)).log()).to(dtype)
    powers = shifted.exp()
    return (powers / p.reduced(powers.sum(dims, keepdim=True))).to(dtype)


def softmax_backward(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """_softmax_backward_data and _log_softmax_backward_data."""
    grad, output, dim, input_dtype = args
    dims = as_dims(dim, output.ndim)
    if not output.numel() or not sharding_axes(output.global_layout, dims) or not output.is_floating_point():
        return p.by_lines(func, args, kwargs)
    grad, output = widened(p, grad), widened(p, output)
    if func is aten._log_softmax_backward_data.default:
        return (grad - output.exp() * p.reduced(grad.sum(dims, keepdim=True))).to(input_dtype)
    product = grad * output
    return (product - output * p.reduced(product.sum(dims, keepdim=True))).to(input_dtype)


def layer_norm(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """native_layer_norm(input, normalized_shape, weight?, bias?, eps) -> output, mean, rstd."""
    x, normalized, weight, bias, eps = args
    dims = _normalized_dims(x, normalized)
    if not dims or not x.numel() or not sharding_axes(x.global_layout, dims):
        return p.by_lines(func, args, kwargs)
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


def layer_norm_backward(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """native_layer_norm_backward(grad_out, input, normalized_shape, mean, rstd, weight?, bias?, output_mask)."""
    grad, x, normalized, mean, rstd, weight, bias, mask = args
    dims = _normalized_dims(x, normalized)
    if not dims or not x.numel() or not sharding_axes(x.global_layout, dims):
        return p.by_lines(func, args, kwargs)
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


SOFTMAX = Rule(along_others(kinds=()), same_shape, reads_sizes=False, program=softmax)
SOFTMAX_BACKWARD = Rule(softmax_backward_lines, same_shape, reads_sizes=False, program=softmax_backward)

RULES: dict[str, Rule] = {
    "_softmax.default": SOFTMAX,
    "_log_softmax.default": SOFTMAX,
    "_softmax_backward_data.default": SOFTMAX_BACKWARD,
    "_log_softmax_backward_data.default": SOFTMAX_BACKWARD,
    "native_layer_norm.default": Rule(layer_norm_lines, layer_norm_meta, program=layer_norm),
    "native_layer_norm_backward.default": Rule(
        layer_norm_backward_lines, layer_norm_backward_meta, program=layer_norm_backward
    ),
    "_fused_rms_norm.default": Rule(layer_norm_lines, layer_norm_meta),
    "_fused_rms_norm_backward.default": Rule(layer_norm_backward_lines, layer_norm_backward_meta),
    "native_group_norm.default": Rule(group_norm_lines, group_norm_meta, group_norm_args),
    "native_group_norm_backward.default": Rule(
        group_norm_backward_lines, group_norm_backward_meta, group_norm_args
    ),
}
