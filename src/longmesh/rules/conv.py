"""Convolutions: by batch row, by output channel, by input channel (a pending sum), by group.

    input (N, C, *spatial)   weight (O, C / groups, *kernel), or (C, O / groups, *kernel) if transposed

A sharded spatial dim needs its neighbours' rows, which no local call has: those lines are in `SPATIAL` form, for
the plan that fetches them (`rules/window.py` says which rows).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from longmesh.rules import spatial
from longmesh.rules.rule import (
    AVG,
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
    line,
    refuse_shapes,
)
from longmesh.rules.window import transposed_size, window_size
from longmesh.spec import Placement


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

        def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *rest: Any) -> Any:
            return nothing_forward(x, bias, view.output_shapes[0])

        return forward
    mask: list[bool] = list(call["output_mask"])

    def backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> Any:
        return nothing_backward(grad, x, weight, mask)

    return backward


def nothing_forward(x: torch.Tensor, bias: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor:
    """A sum over no input channels, or no output at all."""
    out = x.new_zeros(shape)
    return out if bias is None else out + bias.view(-1, *[1] * (len(shape) - 2))


def nothing_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, mask: list[bool]
) -> tuple[torch.Tensor | None, ...]:
    """The gradients where one of the operands has no elements; only the bias's may not be zero."""
    over = [d for d in range(grad.ndim) if d != 1]
    return (
        torch.zeros_like(x) if mask[0] else None,
        torch.zeros_like(weight) if mask[1] else None,
        grad.sum(over) if mask[2] else None,
    )


RULES: dict[str, Rule] = {
    **spatial.RULES,
    "convolution.default": Rule(forward_lines, forward_meta, local_arguments, local_op),
    "convolution_backward.default": Rule(backward_lines, None, local_arguments, local_op),
}
