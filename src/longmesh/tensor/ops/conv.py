"""Convolution over a sharded spatial dim: fetch the rows around the border, then convolve locally.

    rows of the output of this rank  ->  rows of the input they need (`rules/window.py`)
    one all_to_all per sharded dim brings those that others have (`comm/halo.py`); the backward sends gradients home

Everything else about a convolution is a rule. Where no spatial dim is sharded, so is the whole op.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from longmesh._torch import OpOverload, aten
from longmesh.comm.groups import MeshComm
from longmesh.rules import OpCall
from longmesh.rules.conv import RULES, is_backward, nothing_backward, nothing_forward, slide_of, spatial_lines
from longmesh.rules.window import Slide
from longmesh.spec import Layout
from longmesh.tensor.by_rule import describe_call
from longmesh.tensor.make_plan import Family
from longmesh.tensor.op_facts import facts_of
from longmesh.tensor.ops.halo import Border, borders_of, fetch, padded, send_home
from longmesh.tensor.planned import Planned
from longmesh.tensor.planner import USUAL, Planner
from longmesh.tensor.propagate import Choice, choose


def convolution(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)."""
    if kwargs or not _is_spatial(args[:1]):
        return USUAL
    choice, call = _planned(p, func, args)
    tensors = [t for t in args[:3] if t is not None]
    x, weight, *rest = (p.redistribute(t, y) for t, y in zip(tensors, choice.inputs, strict=True))
    bias = rest[0] if rest else None
    out, shape = choice.outputs[0], call.outputs[0].shape
    borders = _borders(call, 0, choice.inputs[0], out, shape, p.comm)
    rows = fetch(p, x, x.local_shape, x.dtype, borders)
    static = _static(call, args[3:], borders, x.local_shape[1])
    local_shape = tuple(map(int, out.local_shape(shape, p.comm.coordinate)))
    is_transposed = bool(call["transposed"])

    def convolve(
        rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor
    ) -> torch.Tensor:
        if is_transposed:
            result = _transposed(func, rows, weight, static, borders, local_shape)
            return result if bias is None else result + bias.view(-1, *[1] * (len(local_shape) - 2))
        around = padded(rows, borders)
        if around.numel() == 0 or weight.numel() == 0 or 0 in local_shape:
            return nothing_forward(x, bias, local_shape)
        return func(around, weight, bias, *static)

    return p.wrap(p.local(convolve, rows, weight, bias, x), x, layout=out, shape=shape)


def _transposed(
    func: OpOverload,
    local: torch.Tensor,
    weight: torch.Tensor,
    static: list[Any],
    borders: Sequence[Border],
    shape: tuple[int, ...],
) -> torch.Tensor:
    if local.numel() == 0 or weight.numel() == 0 or 0 in shape:
        return local.new_zeros(shape)
    return padded(func(local, weight, None, *static), borders)


def convolution_backward(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """convolution_backward(grad, input, weight, bias_sizes, stride, ..., groups, output_mask)."""
    if kwargs or not _is_spatial(args[:2]):
        return USUAL
    choice, call = _planned(p, func, args)
    grad, x, weight = (p.redistribute(t, y) for t, y in zip(args[:3], choice.inputs, strict=True))
    borders = _borders(call, 1, choice.inputs[1], choice.inputs[0], call.tensors[0].shape, p.comm)
    rows = fetch(p, x, x.local_shape, x.dtype, borders)
    static = _static(call, args[4:10], borders, x.local_shape[1])
    mask = list(args[10])
    is_transposed = bool(call["transposed"])

    def differentiate(grad: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor) -> list[Any]:
        return _backward(func, grad, rows, weight, static, borders, mask, is_transposed)

    found = iter(p.locals(sum(mask), differentiate, grad, rows, weight))
    wanted = iter(zip(choice.outputs, call.outputs, strict=True))
    results: list[Planned | None] = []
    for number, is_wanted in enumerate(mask):
        if not is_wanted:
            results.append(None)
            continue
        part, (layout, meta) = next(found), next(wanted)
        if number == 0:
            part = send_home(p, part, x.local_shape, x.dtype, borders)
        results.append(p.wrap(part, x, layout=layout, shape=meta.shape))
    return tuple(results)


def _backward(
    func: OpOverload,
    grad: torch.Tensor,
    rows: torch.Tensor,
    weight: torch.Tensor,
    static: list[Any],
    borders: Sequence[Border],
    mask: list[bool],
    transposed: bool,
) -> list[Any]:
    """Gradients of the fetched rows, the weight and the bias, from this rank's part of the output's gradient."""
    bias_mask = [mask[0], mask[1], False]
    around = rows if transposed else padded(rows, borders)
    if grad.numel() == 0 or around.numel() == 0 or weight.numel() == 0:
        found = list(nothing_backward(grad, rows, weight, bias_mask))
    elif transposed:
        whole = padded(grad, borders, sign=-1)
        found = list(func(whole, rows, weight, None, *static, bias_mask))
    else:
        found = list(func(grad, around, weight, None, *static, bias_mask))
        if mask[0]:
            found[0] = padded(found[0], borders, sign=-1)
    if mask[2]:
        found[2] = grad.sum([d for d in range(grad.ndim) if d != 1])
    return found


# -- geometry ----------------------------------------------------------------------------------------


def _is_spatial(tensors: Sequence[Any]) -> bool:
    return any(isinstance(t, Planned) and any(d >= 2 for d in t._layout.shard_dims) for t in tensors)


def _planned(p: Planner, func: OpOverload, args: tuple[Any, ...]) -> tuple[Choice, OpCall]:
    """The layouts of operands and results, as for any op, with spatial shards among the options."""
    rule = RULES[facts_of(func).rule_name]
    call, layouts = describe_call(func, rule, args, {})
    choice = choose(call, [*spatial_lines(call), *rule.axis_rules(call)], layouts, p.comm.cluster)
    assert choice is not None, "everything replicated is always valid"
    return choice, call


def _borders(
    call: OpCall, x: int, layout: Layout, out: Layout, out_shape: Sequence[int], comm: MeshComm
) -> list[Border]:
    """The sharded spatial dims of input number `x`, laid out as `layout`, for outputs laid out as `out`."""
    shape, kernel = call.tensors[x].shape, call.tensors[x + 1].shape
    slides: dict[int, Slide] = {}
    for dim in range(2, len(shape)):
        stride, padding, dilation, _ = slide_of(call, dim - 2)
        slides[dim] = Slide(shape[dim], kernel[dim], stride, padding, dilation, bool(call["transposed"]))
    return borders_of(slides, layout, out, out_shape, comm)


def _static(call: OpCall, static: Sequence[Any], borders: Sequence[Border], channels: int) -> list[Any]:
    """stride ... groups of the local call: sharded dims come padded, groups are those of the local channels."""
    _, _, _, transposed, _, groups = static
    x = call.tensors[1 if is_backward(call) else 0]
    slides = [slide_of(call, i) for i in range(x.ndim - 2)]
    stride, padding, dilation, output_padding = (list(values) for values in zip(*slides, strict=True))
    for border in borders:
        padding[border.dim - 2] = output_padding[border.dim - 2] = 0
    groups = max(channels // (x.shape[1] // groups), 1) if groups > 1 else 1
    return [stride, padding, dilation, transposed, output_padding, groups]


FAMILIES: dict[OpOverload, Family] = {
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
}
