"""Convolution over a cut spatial dim: fetch the rows around the cut, then convolve locally.

    rows of the output of this rank  ->  rows of the input they need (`rules/window.py`)
    one all_to_all per cut dim brings those that others hold (`comm/halo.py`); the backward sends their gradients home

Everything else about a convolution is a rule. Where no spatial dim is cut, so is the whole op.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from longmesh.comm import comm_of
from longmesh.comm.groups import MeshComm
from longmesh.rules import Meta, OpCall, OutMeta
from longmesh.rules.conv import (
    backward_lines,
    forward_lines,
    forward_meta,
    nothing_backward,
    nothing_forward,
    slide_of,
    spatial_lines,
)
from longmesh.rules.rule import contiguous
from longmesh.rules.window import Slide
from longmesh.spec import Layout
from longmesh.tensor.autograd import move
from longmesh.tensor.dispatch import Handler, dispatch
from longmesh.tensor.dtensor import DTensor
from longmesh.tensor.meta import global_stride
from longmesh.tensor.ops.halo import Halo, fetch, halos_of, padded, send_home
from longmesh.tensor.propagate import Choice, choose

aten = torch.ops.aten


def convolution(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)."""
    if kwargs or not _is_spatial(args[:1]) or not _all_distributed(args[:3]):
        return dispatch.run(func, args, kwargs)
    x, bias = args[0], args[2]
    choice, call = _planned(func, args)
    comm = comm_of(x._mesh)
    local_x, local_w, *local_b = (
        move(t, y)._local_tensor
        for t, y in zip([t for t in args[:3] if t is not None], choice.inputs, strict=True)
    )
    local_bias = local_b[0] if bias is not None else None
    out, shape = choice.outputs[0], call.outputs[0].shape
    halos = _halos(call, 0, choice.inputs[0], out, shape, comm)
    local = fetch(local_x, halos)
    static = _static(call, args[3:], halos, local.shape[1])
    local_shape = tuple(out.local_shape(shape, comm.coordinate))
    if call["transposed"]:
        result = _transposed(func, local, local_w, static, halos, local_shape)
        if local_bias is not None:
            result = result + local_bias.view(-1, *[1] * (len(shape) - 2))
    else:
        local = padded(local, halos)
        if local.numel() == 0 or local_w.numel() == 0 or 0 in local_shape:
            result = nothing_forward(local_x, local_bias, local_shape)  # pyright: ignore[reportArgumentType]
        else:
            result = func(local, local_w, local_bias, *static)
    assert tuple(result.shape) == local_shape, (result.shape, local_shape)
    return DTensor(result, x._mesh, out, shape, global_stride(shape, result))


def _transposed(
    func: OpOverload,
    local: torch.Tensor,
    weight: torch.Tensor,
    static: list[Any],
    halos: Sequence[Halo],
    shape: tuple[Any, ...],
) -> torch.Tensor:
    if local.numel() == 0 or weight.numel() == 0 or 0 in shape:
        return local.new_zeros(shape)
    return padded(func(local, weight, None, *static), halos)


def convolution_backward(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """convolution_backward(grad, input, weight, bias_sizes, stride, ..., groups, output_mask)."""
    if kwargs or not _is_spatial(args[:2]) or not _all_distributed(args[:3]):
        return dispatch.run(func, args, kwargs)
    choice, call = _planned(func, args)
    comm = comm_of(args[0]._mesh)
    grad, x, weight = (move(t, y)._local_tensor for t, y in zip(args[:3], choice.inputs, strict=True))
    halos = _halos(call, 1, choice.inputs[1], choice.inputs[0], call.tensors[0].shape, comm)
    rows = fetch(x, halos)
    static = _static(call, args[4:10], halos, x.shape[1])
    mask = list(args[10])
    found = _backward(func, grad, rows, weight, static, halos, mask, bool(call["transposed"]))
    if mask[0]:
        found[0] = send_home(found[0], halos)
    wanted = iter(zip(choice.outputs, call.outputs, strict=True))
    results: list[DTensor | None] = []
    for value, is_wanted in zip(found, mask, strict=True):
        if not is_wanted:
            results.append(None)
            continue
        layout, meta = next(wanted)
        results.append(DTensor(value, args[0]._mesh, layout, meta.shape, global_stride(meta.shape, value)))
    return tuple(results)


def _backward(
    func: OpOverload,
    grad: torch.Tensor,
    rows: torch.Tensor,
    weight: torch.Tensor,
    static: list[Any],
    halos: Sequence[Halo],
    mask: list[bool],
    transposed: bool,
) -> list[Any]:
    """Gradients of the fetched rows, the weight and the bias, from this rank's part of the output's gradient."""
    bias_mask = [mask[0], mask[1], False]
    around = rows if transposed else padded(rows, halos)
    if grad.numel() == 0 or around.numel() == 0 or weight.numel() == 0:
        found = list(nothing_backward(grad, rows, weight, bias_mask))
    elif transposed:
        whole = padded(grad, halos, sign=-1)
        found = list(func(whole, rows, weight, None, *static, bias_mask))
    else:
        found = list(func(grad, around, weight, None, *static, bias_mask))
        if mask[0]:
            found[0] = padded(found[0], halos, sign=-1)
    if mask[2]:
        found[2] = grad.sum([d for d in range(grad.ndim) if d != 1])
    return found


# -- geometry ----------------------------------------------------------------------------------------


def _is_spatial(tensors: Sequence[Any]) -> bool:
    return any(isinstance(t, DTensor) and any(d >= 2 for d in t._layout.shard_dims) for t in tensors)


def _all_distributed(tensors: Sequence[Any]) -> bool:
    return all(t is None or isinstance(t, DTensor) for t in tensors)


def _planned(func: OpOverload, args: tuple[Any, ...]) -> tuple[Choice, OpCall]:
    """The layouts of operands and results, as for any op, with spatial cuts among the options."""
    layouts: list[Layout] = []
    described: list[Any] = []
    for arg in args:
        if isinstance(arg, DTensor):
            described.append(Meta(len(layouts), tuple(arg.shape), arg.stride(), arg.dtype))
            layouts.append(arg._layout)
        else:
            described.append(tuple(arg) if isinstance(arg, list) else arg)
    return _choose(func, tuple(described), tuple(layouts))


@functools.lru_cache(maxsize=4096)
def _choose(func: OpOverload, args: tuple[Any, ...], layouts: tuple[Layout, ...]) -> tuple[Choice, OpCall]:
    metas = tuple(a for a in args if isinstance(a, Meta))
    call = OpCall(func, args, {}, metas)
    if func is aten.convolution.default:
        outputs: tuple[OutMeta, ...] = forward_meta(call)
    else:
        shapes = (metas[1].shape, metas[2].shape, tuple(call["bias_sizes"] or (metas[0].shape[1],)))
        outputs = tuple(
            contiguous(s) for s, wanted in zip(shapes, call["output_mask"], strict=True) if wanted
        )
    call = OpCall(func, args, {}, metas, outputs)
    lines = forward_lines(call) if func is aten.convolution.default else backward_lines(call)
    choice = choose(call, [*spatial_lines(call), *lines], layouts)
    assert choice is not None, "everything replicated is always valid"
    return choice, call


def _halos(
    call: OpCall, x: int, layout: Layout, out: Layout, out_shape: Sequence[int], comm: MeshComm
) -> list[Halo]:
    """The cut spatial dims of input number `x`, laid out as `layout`, for outputs laid out as `out`."""
    shape, kernel = call.tensors[x].shape, call.tensors[x + 1].shape
    slides: dict[int, Slide] = {}
    for dim in range(2, len(shape)):
        stride, padding, dilation, _ = slide_of(call, dim - 2)
        slides[dim] = Slide(shape[dim], kernel[dim], stride, padding, dilation, bool(call["transposed"]))
    return halos_of(slides, layout, out, out_shape, comm)


def _static(call: OpCall, static: Sequence[Any], halos: Sequence[Halo], channels: int) -> list[Any]:
    """stride ... groups of the local call: cut dims come padded, groups are those of the local channels."""
    _, _, _, transposed, _, groups = static
    backward = call.func is aten.convolution_backward.default
    x = call.tensors[1 if backward else 0]
    slides = [slide_of(call, i) for i in range(x.ndim - 2)]
    stride, padding, dilation, output_padding = (list(values) for values in zip(*slides, strict=True))
    for halo in halos:
        padding[halo.dim - 2] = output_padding[halo.dim - 2] = 0
    groups = max(channels // (x.shape[1] // groups), 1) if groups > 1 else 1
    return [stride, padding, dilation, transposed, output_padding, groups]


HANDLERS: dict[OpOverload, Handler] = {
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
}
