"""Convolutions: by batch row, by output channel, by input channel (a pending sum), by group.

    input (N, C, *spatial)   weight (O, C / groups, *kernel), or (C, O / groups, *kernel) if transposed

A sharded spatial dim needs its neighbours' rows, which no local call has: the program fetches them, convolves locally,
and sends gradients home (`rules/halo.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from longmesh._torch import OpOverload
from longmesh.rules.halo import Border, Pads, borders_of, fetch, padded, pads_of, send_home
from longmesh.rules.planned import Planned
from longmesh.rules.rule import (
    AVG,
    AxisRule,
    Fixed,
    LocalView,
    Meta,
    OpCall,
    OutMeta,
    P,
    R,
    Rule,
    S,
    contiguous,
    line,
    refuse_shapes,
)
from longmesh.rules.window import Slide, transposed_size, window_size
from longmesh.rules.writer import Writer
from longmesh.spec import Coordinate, Layout, Placement


def forward_lines(call: OpCall) -> list[AxisRule]:
    """Lines of convolution(input, weight, bias?, ...) that need no neighbour."""
    bias = len(call.tensors) == 3
    out_dim, in_dim = _channel_dims(call)

    def entry(x: Placement, w: Placement, b: Placement, out: Placement, **extra: Any) -> AxisRule:
        return line([x, w, *([b] if bias else [])], out, **extra)

    lines = [entry(S(0), R, R, S(0))]
    if call["groups"] == 1:
        lines += [entry(R, S(out_dim), S(0), S(1)), entry(S(1), S(in_dim), P, P)]
    else:
        x, weight, out = _whole_groups(call)
        even = ((0, 1, x), (1, 0, weight), (-1, 1, out))
        is_depthwise = call.tensors[0].shape[1] == call["groups"] == call.outputs[0].shape[1]
        lines.append(entry(S(1), S(0), S(0), S(1), even=() if is_depthwise else even))  # else whole groups
    lines += [entry(P, R, P, P), entry(R, P, P, P), entry(AVG, R, R, AVG), entry(R, AVG, R, AVG)]
    return lines


def backward_lines(call: OpCall) -> list[AxisRule]:
    """Lines of convolution_backward(grad, input, weight, ...) -> whichever of the three gradients are asked for."""
    out_dim, in_dim = _channel_dims(call)

    def entry(ins: list[Placement], outs: list[Placement], **extra: Any) -> AxisRule:
        return line(ins, [p for p, wanted in zip(outs, call["output_mask"], strict=True) if wanted], **extra)

    lines = [entry([S(0), S(0), R], [S(0), P, P])]
    if call["groups"] == 1:
        lines += [
            entry([S(1), R, S(out_dim)], [P, S(out_dim), S(0)]),
            entry([R, S(1), S(in_dim)], [S(1), S(in_dim), R]),
        ]
    else:
        x, weight, out = _whole_groups(call)
        even = ((0, 1, out), (1, 1, x), (2, 0, weight))
        is_depthwise = call.tensors[1].shape[1] == call["groups"] == call.tensors[0].shape[1]
        lines.append(entry([S(1), S(1), S(0)], [S(1), S(0), S(0)], even=() if is_depthwise else even))
    for p in (P, AVG):
        lines += [entry([p, R, R], [p, p, p]), entry([R, p, R], [R, p, R]), entry([R, R, p], [p, R, R])]
    return lines


def spatial_lines(call: OpCall) -> list[AxisRule]:
    """One line per spatial dim, for the plan that fetches the rows beyond a shard's borders."""
    dims = range(2, call.tensors[0].ndim)
    if not is_backward(call):
        rest = [R] * (len(call.tensors) - 1)
        return [line([S(d), *rest], S(d)) for d in dims]
    return [
        line([S(d), S(d), R], [p for p, w in zip((S(d), P, P), call["output_mask"], strict=True) if w])
        for d in dims
    ]


def is_backward(call: OpCall) -> bool:
    return call.func is torch.ops.aten.convolution_backward.default


def _channel_dims(call: OpCall) -> tuple[int, int]:
    """The weight's dims of output and of input channels."""
    return (1, 0) if call["transposed"] else (0, 1)


def _whole_groups(call: OpCall) -> tuple[int, int, int]:
    """Channels of one group: of the input, of the weight's dim 0, of the output."""
    weight = call.tensors[2 if is_backward(call) else 1]
    rows, groups = weight.shape[0] // call["groups"], call["groups"]
    if call["transposed"]:
        return rows, rows, weight.shape[1]
    return weight.shape[1], rows, max(weight.shape[0] // groups, 1)


def forward_meta(call: OpCall) -> tuple[OutMeta, ...]:
    x, weight, *bias = call.tensors
    channels = weight.shape[1] * call["groups"] if call["transposed"] else weight.shape[0]
    read = weight.shape[0] if call["transposed"] else weight.shape[1] * call["groups"]
    if x.ndim != weight.ndim or x.shape[1] != read or (bias and bias[0].shape != (channels,)):
        refuse_shapes(
            call, f"the weight is for {read} channels in and {channels} out, in groups of {call['groups']}"
        )
    sizes: list[int] = []
    for i, (size, kernel) in enumerate(zip(x.shape[2:], weight.shape[2:], strict=True)):
        stride, padding, dilation, extra = slide_of(call, i)
        if call["transposed"]:
            sizes.append(transposed_size(size, kernel, stride, padding, dilation, extra))
        else:
            sizes.append(window_size(size, kernel, stride, padding, dilation))
    shape = (x.shape[0], channels, *sizes)
    return (channels_last(shape) if is_channels_last(x) or is_channels_last(weight) else contiguous(shape),)


def slide_of(call: OpCall, i: int) -> tuple[int, int, int, int]:
    """Stride, padding, dilation and output padding along spatial dim `i`; one number stands for all dims."""
    lists = (call[name] for name in ("stride", "padding", "dilation", "output_padding"))
    stride, padding, dilation, extra = (values[i if len(values) > 1 else 0] for values in lists)
    return stride, padding, dilation, extra


def channels_last(shape: tuple[int, ...]) -> OutMeta:
    """A dense output whose channels are innermost in memory."""
    last = contiguous((shape[0], *shape[2:], shape[1])).stride
    return OutMeta(shape, (last[0], last[-1], *last[1:-1]))


def is_channels_last(meta: Meta) -> bool:
    return (
        meta.ndim in (4, 5)
        and meta.stride == channels_last(meta.shape).stride != contiguous(meta.shape).stride
    )


def local_arguments(call: OpCall, view: LocalView) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The groups and bias sizes of one rank's part."""
    changes: dict[str, Any] = {}
    x = 1 if is_backward(call) else 0
    if call["groups"] > 1:
        per_group = call.tensors[x].shape[1] // call["groups"]
        changes["groups"] = max(view.input_shapes[x][1] // per_group, 1)
    if call.get("bias_sizes") is not None:
        changes["bias_sizes"] = [view.input_shapes[0][1]]
    return call.changed(**changes)


def local_op(call: OpCall, view: LocalView) -> Callable[..., Any] | None:
    """What a rank without elements of its own does: torch refuses convolutions of nothing."""
    if all(math.prod(shape) for shape in view.input_shapes):
        return None
    if call.func is torch.ops.aten.convolution.default:
        return Fixed(_forward_of_nothing, (view.output_shapes[0],))
    return Fixed(_backward_of_nothing, (tuple(call["output_mask"]),))


def _forward_of_nothing(
    shape: tuple[int, ...], x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *rest: Any
) -> torch.Tensor:
    return nothing_forward(x, bias, shape)


def _backward_of_nothing(
    mask: Sequence[bool], grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor | None, ...]:
    return nothing_backward(grad, x, weight, mask)


def nothing_forward(x: torch.Tensor, bias: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor:
    """A sum over no input channels, or no output at all."""
    out = x.new_zeros(shape)
    return out if bias is None else out + bias.view(-1, *[1] * (len(shape) - 2))


def nothing_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, mask: Sequence[bool]
) -> tuple[torch.Tensor | None, ...]:
    """The gradients where one of the operands has no elements; only the bias's may not be zero."""
    over = [d for d in range(grad.ndim) if d != 1]
    return (
        torch.zeros_like(x) if mask[0] else None,
        torch.zeros_like(weight) if mask[1] else None,
        grad.sum(over) if mask[2] else None,
    )


# -- over a sharded spatial dim --------------------------------------------------------------------


def convolution(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)."""
    if kwargs or not _is_spatial(args[:1]):
        return p.by_lines(func, args, kwargs)
    choice, call = p.choose(func, args, spatial_lines)
    tensors = [t for t in args[:3] if t is not None]
    x, weight, *rest = (p.redistribute(t, y) for t, y in zip(tensors, choice.inputs, strict=True))
    out, shape = choice.outputs[0], call.outputs[0].shape
    borders = _borders(call, 0, choice.inputs[0], out, shape, p.coordinate)
    rows = fetch(p, x, x.local_shape, x.dtype, borders)
    local_shape = tuple(map(int, out.local_shape(shape, p.coordinate)))
    how = (func, _static(call, args[3:], borders, x.local_shape[1]), pads_of(borders), local_shape)
    convolve = _spread_rows if call["transposed"] else _convolve_rows
    return p.wrap(
        p.local(convolve, rows, weight, rest[0] if rest else None, x, *how), x, layout=out, shape=shape
    )


def _convolve_rows(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    x: torch.Tensor,
    func: OpOverload,
    static: list[Any],
    pads: Pads,
    shape: tuple[int, ...],
) -> torch.Tensor:
    around = padded(rows, pads)
    if around.numel() == 0 or weight.numel() == 0 or 0 in shape:
        return nothing_forward(x, bias, shape)
    return func(around, weight, bias, *static)


def _spread_rows(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    x: torch.Tensor,
    func: OpOverload,
    static: list[Any],
    pads: Pads,
    shape: tuple[int, ...],
) -> torch.Tensor:
    """The same of a transposed convolution, whose output is padded, or cut."""
    is_nothing = rows.numel() == 0 or weight.numel() == 0 or 0 in shape
    result = rows.new_zeros(shape) if is_nothing else padded(func(rows, weight, None, *static), pads)
    return result if bias is None else result + bias.view(-1, *[1] * (len(shape) - 2))


def convolution_backward(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """convolution_backward(grad, input, weight, bias_sizes, stride, ..., groups, output_mask)."""
    if kwargs or not _is_spatial(args[:2]):
        return p.by_lines(func, args, kwargs)
    choice, call = p.choose(func, args, spatial_lines)
    grad, x, weight = (p.redistribute(t, y) for t, y in zip(args[:3], choice.inputs, strict=True))
    borders = _borders(call, 1, choice.inputs[1], choice.inputs[0], call.tensors[0].shape, p.coordinate)
    rows = fetch(p, x, x.local_shape, x.dtype, borders)
    static = _static(call, args[4:10], borders, x.local_shape[1])
    mask = list(args[10])
    how = (func, static, pads_of(borders), mask, bool(call["transposed"]))
    found = iter(p.locals(sum(mask), _differentiate, grad, rows, weight, *how))
    outputs: list[tuple[Layout, OutMeta]] = list(zip(choice.outputs, call.outputs, strict=True))
    results: list[Planned | None] = []
    for number, is_wanted in enumerate(mask):
        if not is_wanted:
            results.append(None)
            continue
        part, (layout, meta) = next(found), outputs.pop(0)
        if number == 0:
            part = send_home(p, part, x.local_shape, x.dtype, borders)
        results.append(p.wrap(part, x, layout=layout, shape=meta.shape))
    return tuple(results)


def _differentiate(
    grad: torch.Tensor,
    rows: torch.Tensor,
    weight: torch.Tensor,
    func: OpOverload,
    static: list[Any],
    pads: Pads,
    mask: list[bool],
    transposed: bool,
) -> list[Any]:
    """Gradients of the fetched rows, the weight and the bias, from this rank's part of the output's gradient."""
    bias_mask = [mask[0], mask[1], False]
    around = rows if transposed else padded(rows, pads)
    if grad.numel() == 0 or around.numel() == 0 or weight.numel() == 0:
        found = list(nothing_backward(grad, rows, weight, bias_mask))
    elif transposed:
        found = list(func(padded(grad, pads, sign=-1), rows, weight, None, *static, bias_mask))
    else:
        found = list(func(grad, around, weight, None, *static, bias_mask))
        if mask[0]:
            found[0] = padded(found[0], pads, sign=-1)
    if mask[2]:
        found[2] = grad.sum([d for d in range(grad.ndim) if d != 1])
    return found


def _is_spatial(tensors: Sequence[Any]) -> bool:
    return any(isinstance(t, Planned) and any(d >= 2 for d in t.global_layout.shard_dims) for t in tensors)


def _borders(
    call: OpCall, x: int, layout: Layout, out: Layout, out_shape: Sequence[int], where: Coordinate
) -> list[Border]:
    """The sharded spatial dims of input number `x`, laid out as `layout`, for outputs laid out as `out`."""
    shape, kernel = call.tensors[x].shape, call.tensors[x + 1].shape
    slides: dict[int, Slide] = {}
    for dim in range(2, len(shape)):
        stride, padding, dilation, _ = slide_of(call, dim - 2)
        slides[dim] = Slide(shape[dim], kernel[dim], stride, padding, dilation, bool(call["transposed"]))
    return borders_of(slides, layout, out, out_shape, where)


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


RULES: dict[str, Rule] = {
    "convolution.default": Rule(forward_lines, forward_meta, local_arguments, local_op, program=convolution),
    "convolution_backward.default": Rule(
        backward_lines, None, local_arguments, local_op, program=convolution_backward
    ),
}
