"""Tensors made after the likeness of others: zeros_like, new_full, fill_.

The values don't depend on the input's, so whatever is pending there gives a replicated result and nothing
is sent. A `new_*` of the input's own shape is sharded as the input is; of another shape it is replicated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from longmesh.rules.pointwise import copy_meta
from longmesh.rules.rule import AxisRule, LocalView, OpCall, OutMeta, P, R, Rule, S, contiguous, like, line
from longmesh.rules.view import local_sizes
from longmesh.spec import REDUCE_OPS, MaskPartial, Partial, Placement

PENDING: tuple[Placement, ...] = (*(Partial(op) for op in REDUCE_OPS), MaskPartial())


def like_lines(call: OpCall) -> list[AxisRule]:
    """Sharded as the first tensor; a second one (the value to fill with) is replicated."""
    others = [R] * (len(call.tensors) - 1)
    return [
        *(line([S(d), *others], S(d)) for d in range(call.tensors[0].ndim)),
        *(line([p, *others], R) for p in PENDING),
    ]


def fill_lines(call: OpCall) -> list[AxisRule]:
    """fill by a 0-dim tensor: pending if that is."""
    return [*like_lines(call), line([P, P], P)]


def zero_lines(call: OpCall) -> list[AxisRule]:
    """zero_: all terms zero are zero, whatever the reduction, so a pending tensor is cleared as it is."""
    return [line([S(d)], S(d)) for d in range(call.tensors[0].ndim)] + [line([p], p) for p in PENDING]


def new_lines(call: OpCall) -> list[AxisRule]:
    """new_zeros(size): as the input if it has that shape, else replicated whatever the layout of the input."""
    meta = call.tensors[0]
    same = tuple(call["size"]) == meta.shape
    return [
        *(line([S(d)], S(d) if same else R) for d in range(meta.ndim)),
        *(line([p], R) for p in PENDING),
    ]


def new_meta(call: OpCall) -> tuple[OutMeta, ...]:
    return (contiguous(call["size"]),)


def strided_meta(call: OpCall) -> tuple[OutMeta, ...]:
    return (OutMeta(tuple(call["size"]), tuple(call["stride"])),)


def local_size_and_stride(call: OpCall, view: LocalView) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The local part has the memory order of the whole: a step longer than what is inside it shrinks with that."""
    shape, size, stride = view.output_shapes[0], call["size"], call["stride"]
    local = list(stride)
    if tuple(shape) != tuple(size):
        step = 1
        for dim in sorted(range(len(shape)), key=lambda d: (stride[d], -d)):
            local[dim] = step
            step *= max(shape[dim], 1)
    return (call.args[0], shape, local, *call.args[3:]), dict(call.kwargs)


def _filled(lines: Callable[[OpCall], list[AxisRule]]) -> Rule:
    return Rule(lines, lambda call: (like(call.tensors[0]),))


LIKE = Rule(like_lines, copy_meta)
NEW = Rule(new_lines, new_meta, local_sizes)

RULES: dict[str, Rule] = {
    **dict.fromkeys(
        ("zeros_like.default", "ones_like.default", "full_like.default", "empty_like.default"), LIKE
    ),
    **dict.fromkeys(("new_zeros.default", "new_ones.default", "new_full.default", "new_empty.default"), NEW),
    "new_empty_strided.default": Rule(new_lines, strided_meta, local_size_and_stride),
    "fill.Scalar": _filled(like_lines),
    "fill.Tensor": _filled(fill_lines),
    "zero.default": _filled(zero_lines),
}
