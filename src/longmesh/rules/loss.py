"""Losses: pointwise ones, and those with one term a row.

    reduction none   as any pointwise op
    sum              every rank sums its terms: pending
    mean             every rank's mean, weighted by its share of the terms: pending, right on uneven shards

The gradient of a mean is that of the rank's own mean times the same share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from longmesh._torch import OpOverload
from longmesh.rules.nll import MEAN, NLL, NLL_BACKWARD, NONE, SUM
from longmesh.rules.pointwise import broadcast_shape, elementwise_meta, shard_of
from longmesh.rules.rule import (
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
    Shape,
    arguments_of,
    contiguous,
    line,
    refuse_shapes,
)
from longmesh.rules.writer import Writer
from longmesh.spec import Placement


def pointwise_lines(call: OpCall) -> list[AxisRule]:
    """One line per dim of the operands' common shape."""
    shape = broadcast_shape(call)
    lines: list[AxisRule] = []
    for dim, size in enumerate(shape):
        if size != 1:
            inputs = [shard_of(meta, dim, len(shape)) for meta in call.tensors]
            lines.append(line(inputs, S(dim) if call.outputs[0].shape == shape else P))
    return lines


def pointwise_meta(call: OpCall) -> tuple[OutMeta, ...]:
    if call["reduction"] != NONE and "grad_output" not in call.argument_names:
        return (contiguous(()),)
    return (elementwise_meta(broadcast_shape(call), call.tensors),)


def pointwise_share(call: OpCall, view: LocalView) -> Callable[..., Any] | None:
    return _shared(call, math.prod(_common(view.input_shapes)), math.prod(broadcast_shape(call)))


def _common(shapes: Sequence[Shape]) -> Shape:
    """The shape that local operands broadcast to."""
    ndim = max(len(shape) for shape in shapes)
    padded = [(1,) * (ndim - len(shape)) + shape for shape in shapes]
    return tuple(next((n for n in sizes if n != 1), 1) for sizes in zip(*padded, strict=True))


def row_lines(call: OpCall) -> list[AxisRule]:
    """One term a row: rows may be sharded, classes not. Class weights are the same for all."""
    if call["self"].ndim < 2:
        return []
    inputs: list[Placement] = []
    for name in call.argument_names:
        meta = call[name]
        if isinstance(meta, Meta):
            inputs.append(R if name == "weight" or meta.ndim == 0 else S(0))
    return [line(inputs, [S(0) if out.shape else P for out in call.outputs])]


def row_meta(call: OpCall) -> tuple[OutMeta, ...]:
    """One term a row, or one number; multilabel_margin_loss also says which classes are targets."""
    names, meta, target = call.argument_names, call["self"], call["target"]
    if meta.ndim == 2 and target.shape[:1] != meta.shape[:1]:
        refuse_shapes(call, "rows and targets must be as many")
    if "grad_output" in names:
        return (contiguous(meta.shape),)
    terms = contiguous(meta.shape[: meta.ndim - 1] if call["reduction"] == NONE else ())
    return (terms, contiguous(target.shape)) if call.num_returns == 2 else (terms,)


def row_share(call: OpCall, view: LocalView) -> Callable[..., Any] | None:
    meta: Meta = call["self"]
    if meta.ndim < 2:
        return None
    mine = view.input_shapes[meta.index][0]
    if not mine and meta.shape[0] and call["reduction"] != NONE and "grad_output" not in call.argument_names:
        return _loss_of_no_rows if call.num_returns == 1 else _loss_and_targets_of_no_rows
    return _shared(call, mine, meta.shape[0])


def _loss_of_no_rows(x: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """torch's kernels leave the loss of no rows uninitialised."""
    return x.new_zeros(())


def _loss_and_targets_of_no_rows(x: torch.Tensor, target: torch.Tensor, reduction: int) -> Any:
    return x.new_zeros(()), torch.empty_like(target, dtype=x.dtype)


def _shared(call: OpCall, mine: int, whole: int) -> Callable[..., Any] | None:
    """A mean over `mine` of `whole` terms, weighted so that the ranks' results add up."""
    if call["reduction"] != MEAN or mine == whole:
        return None
    return Fixed(_scaled, (call.func, call.argument_names.index("reduction"), mine / whole))


def _scaled(func: OpOverload, place: int, share: float, /, *args: Any, **kwargs: Any) -> Any:
    if not share:  # a sum of nothing is 0, a mean of nothing is not
        args, kwargs = _replaced(args, kwargs, place, SUM)
        return func(*args, **kwargs)
    result = func(*args, **kwargs)
    return (result[0] * share, *result[1:]) if isinstance(result, tuple) else result * share


def _replaced(
    args: tuple[Any, ...], kwargs: dict[str, Any], place: int, reduction: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if place < len(args):
        return (*args[:place], reduction, *args[place + 1 :]), kwargs
    return args, {**kwargs, "reduction": reduction}


def ctc(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """_ctc_loss with lengths that are numbers: torch divides by a plain tensor that it makes of them. It walks every
    sequence of a batch from end to end, so it runs on whole tensors."""
    p.lengths = len(arguments_of(func, args, kwargs)["target_lengths"])
    return p.on_whole_tensors(func, args, kwargs)


POINTWISE = Rule(pointwise_lines, pointwise_meta, local_op=pointwise_share)
ROWS = Rule(row_lines, row_meta, local_op=row_share)

RULES: dict[str, Rule] = {
    "_ctc_loss.default": Rule(program=ctc),
    **dict.fromkeys(
        (
            "mse_loss.default", "mse_loss_backward.default", "smooth_l1_loss.default",
            "smooth_l1_loss_backward.default", "huber_loss.default", "huber_loss_backward.default",
            "binary_cross_entropy.default", "binary_cross_entropy_backward.default",
            "binary_cross_entropy_with_logits.default", "soft_margin_loss.default",
            "soft_margin_loss_backward.default",
        ),
        POINTWISE,
    ),
    **dict.fromkeys(
        (
            "multi_margin_loss.default", "multi_margin_loss_backward.default",
            "multilabel_margin_loss_forward.default", "multilabel_margin_loss_backward.default",
        ),
        ROWS,
    ),
    **dict.fromkeys(("nll_loss_forward.default", "nll_loss2d_forward.default"), NLL),
    **dict.fromkeys(("nll_loss_backward.default", "nll_loss2d_backward.default"), NLL_BACKWARD),
}  # fmt: skip
