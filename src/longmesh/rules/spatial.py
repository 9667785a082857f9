"""Resampling and rearranging of images: batch and channel dims may be sharded, spatial ones are gathered."""

from __future__ import annotations

import math
from typing import Any

from longmesh.rules.batched import batched, op_on_nothing, pending_lines
from longmesh.rules.rule import AxisRule, LocalView, OpCall, P, R, Rule, RuleFunction, S, line


def local_sizes(call: OpCall, view: LocalView) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """An `input_size` argument is the size of the output, here of one rank's part."""
    return call.changed(input_size=[max(n, 1) for n in view.output_shapes[0]])


def _resample(spatial: int) -> Rule:
    return Rule(batched((spatial,), (spatial,), linear=0), local_op=op_on_nothing)


def _resample_backward(spatial: int) -> Rule:
    return Rule(batched((spatial,), (spatial,), linear=0), local_args=local_sizes, local_op=op_on_nothing)


# -- rearranged ------------------------------------------------------------------------------------------


def pixel_lines(factor: str, *, shuffle: bool) -> RuleFunction:
    """pixel_shuffle (C r r, H, W) -> (C, H r, W r) and back: pieces must hold whole blocks of r x r."""

    def lines(call: OpCall) -> list[AxisRule]:
        r = int(call[factor])
        ndim = call.tensors[0].ndim
        channel, space = (r * r, 1) if shuffle else (1, r)
        return [
            *(line([S(d)], S(d)) for d in range(ndim - 3)),
            line([S(ndim - 3)], S(ndim - 3), even=((0, ndim - 3, channel),)),
            *(line([S(d)], S(d), even=((0, d, space),)) for d in (ndim - 2, ndim - 1)),
            *pending_lines(call),
        ]

    return lines


def column_lines(call: OpCall) -> list[AxisRule]:
    """im2col (N, C, H, W) -> (N, C k, L) and col2im back: channels in whole blocks of a kernel's taps."""
    ins, outs = call.tensors[0].ndim, len(call.outputs[0].shape)
    channel, out_channel = (ins - 3, outs - 2) if ins > outs else (ins - 2, outs - 3)
    unit = 1 if ins > outs else math.prod(call["kernel_size"])
    batch = [line([S(0)], S(0))] if channel == 1 else []
    return [*batch, line([S(channel)], S(out_channel), even=((0, channel, unit),)), *pending_lines(call)]


# -- sampled at points -----------------------------------------------------------------------------------


def sampler_lines(call: OpCall) -> list[AxisRule]:
    """grid_sampler(input (N, C, *in), grid (N, *out, k)) -> (N, C, *out)."""
    space = range(call.tensors[0].ndim - 2)
    return [
        line([S(0), S(0)], S(0)),
        line([S(1), R], S(1)),
        *(line([R, S(1 + i)], S(2 + i)) for i in space),
        line([P, R], P),
    ]


def sampler_backward_lines(call: OpCall) -> list[AxisRule]:
    """(grad, input, grid) -> gradients of input and grid."""
    space = range(call.tensors[1].ndim - 2)
    wanted = [int(w) for w in call["output_mask"]]

    def entry(ins: list[Any], outs: list[Any]) -> AxisRule:
        return line(ins, [p for p, w in zip(outs, wanted, strict=True) if w or len(call.outputs) == 2])

    return [
        entry([S(0), S(0), S(0)], [S(0), S(0)]),
        entry([S(1), S(1), R], [S(1), P]),
        *(entry([S(2 + i), R, S(1 + i)], [P, S(1 + i)]) for i in space),
        entry([P, R, R], [P, P]),
    ]


def affine_local(call: OpCall, view: LocalView) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return call.changed(size=[max(view.output_shapes[0][0], 1), *call["size"][1:]])


# Ops that resample, with the numbers of spatial dims they come in.
_RESAMPLED = (
    ("upsample_nearest", (1, 2, 3)),
    ("_upsample_nearest_exact", (1, 2, 3)),
    ("upsample_linear", (1,)),
    ("upsample_bilinear", (2,)),
    ("upsample_bicubic", (2,)),
    ("upsample_trilinear", (3,)),
)

RULES: dict[str, Rule] = {
    **{f"{kind}{n}d.default": _resample(n) for kind, dims in _RESAMPLED for n in dims},
    **{f"{kind}{n}d_backward.default": _resample_backward(n) for kind, dims in _RESAMPLED for n in dims},
    **{f"_upsample_{kind}2d_aa.default": _resample(2) for kind in ("bilinear", "bicubic", "lanczos")},
    **{
        f"_upsample_{kind}2d_aa_backward.default": _resample_backward(2)
        for kind in ("bilinear", "bicubic", "lanczos")
    },
    "pixel_shuffle.default": Rule(pixel_lines("upscale_factor", shuffle=True), local_op=op_on_nothing),
    "pixel_unshuffle.default": Rule(pixel_lines("downscale_factor", shuffle=False), local_op=op_on_nothing),
    "im2col.default": Rule(column_lines, local_op=op_on_nothing),
    "col2im.default": Rule(column_lines, local_op=op_on_nothing),
    **{f"grid_sampler_{n}d.default": Rule(sampler_lines, local_op=op_on_nothing) for n in (2, 3)},
    **{
        f"grid_sampler_{n}d_backward.default": Rule(sampler_backward_lines, local_op=op_on_nothing)
        for n in (2, 3)
    },
    "affine_grid_generator.default": Rule(
        batched((2,), (3,)), local_args=affine_local, local_op=op_on_nothing
    ),
}
