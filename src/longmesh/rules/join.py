"""Several tensors made into one: cat and stack. Any dim but the joined one may be sharded, in all of them."""

from __future__ import annotations

from longmesh.rules.rule import AxisRule, Meta, OpCall, OutMeta, R, Rule, S, contiguous, line
from longmesh.rules.view import PENDING, pending_lines


def is_filler(meta: Meta) -> bool:
    """cat skips tensors of shape (0,), whatever the others' shapes."""
    return meta.shape == (0,)


def cat_lines(call: OpCall) -> list[AxisRule]:
    out = call.outputs[0].shape
    dim = call["dim"] % max(len(out), 1)
    lines = [
        line([R if is_filler(m) and len(out) > 1 else S(d) for m in call.tensors], S(d))
        for d in range(len(out))
        if d != dim
    ]
    return lines + pending_lines(call)


def cat_meta(call: OpCall) -> tuple[OutMeta, ...]:
    full = [m for m in call.tensors if not is_filler(m)] or [call.tensors[0]]
    shape = list(full[0].shape)
    dim: int = call["dim"] % max(len(shape), 1)
    shape[dim] = sum(m.shape[dim] for m in full)
    if any(m.ndim != len(shape) or _others(m.shape, dim) != _others(full[0].shape, dim) for m in full):
        raise RuntimeError(
            f"cat along dim {dim} of tensors of shapes {', '.join(str(m.shape) for m in call.tensors)}: "
            "they must agree in every other dim"
        )
    return (contiguous(shape),)


def _others(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return shape[:dim] + shape[dim + 1 :]


def stack_lines(call: OpCall) -> list[AxisRule]:
    ndim = call.tensors[0].ndim
    dim = call["dim"] % (ndim + 1)
    lines = [line([S(d)] * len(call.tensors), S(d + (d >= dim))) for d in range(ndim)]
    return lines + [line([p] * len(call.tensors), p) for p in PENDING]


RULES: dict[str, Rule] = {
    "cat.default": Rule(cat_lines, cat_meta),
    "stack.default": Rule(stack_lines),
}
