"""Pointwise ops: any dim may be cut, the same one in every operand that has it.

An operand that broadcasts along the cut dim (size 1, or the dim missing) is replicated on that axis.
Pending reductions stay pending where the op allows it: sums through linear ops, minima and maxima
through monotone ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from longmesh.rules.rule import P, AxisRule, Meta, OpCall, OutMeta, R, Rule, S, contiguous, line
from longmesh.spec import Partial, Placement

AVG, MIN, MAX = Partial("avg"), Partial("min"), Partial("max")


def broadcast_shape(call: OpCall) -> tuple[int, ...]:
    ndim = max((meta.ndim for meta in call.tensors), default=0)
    shape = [1] * ndim
    for meta in call.tensors:
        for dim, size in enumerate(meta.shape, ndim - meta.ndim):
            if size != 1:
                shape[dim] = size
    return tuple(shape)


def cut_of(meta: Meta, dim: int, ndim: int) -> Placement:
    """How an operand lies on an axis that cuts dim `dim` of a broadcast result of `ndim` dims."""
    own = dim - (ndim - meta.ndim)
    return R if own < 0 or meta.shape[own] == 1 else S(own)


def shard_lines(call: OpCall) -> list[AxisRule]:
    """One line per dim of the broadcast result."""
    shape = broadcast_shape(call)
    ndim = len(shape)
    return [
        line([cut_of(meta, dim, ndim) for meta in call.tensors], (S(dim),) * len(call.outputs))
        for dim, size in enumerate(shape)
        if size != 1
    ]


def elementwise(call: OpCall) -> list[AxisRule]:
    """Any pointwise op."""
    return shard_lines(call)


def additive(call: OpCall) -> list[AxisRule]:
    """Linear in all operands together (add, sub, clone): all of them pending, or none. A plain number added
    to a sum would be added once per rank, so numbers only scale (`alpha`)."""
    lines = shard_lines(call)
    if all(isinstance(a, Meta) for a in call.args[:2]):
        lines += [line([p] * len(call.tensors), p) for p in (P, AVG)]
    return lines


def bilinear(call: OpCall) -> list[AxisRule]:
    """Linear in each operand by itself (mul): one may be pending while the others are replicated."""
    lines = shard_lines(call)
    for pending in (P, AVG):
        for i in range(len(call.tensors)):
            lines.append(line([pending if j == i else R for j in range(len(call.tensors))], pending))
    return lines


def linear_in_first(call: OpCall) -> list[AxisRule]:
    """Linear in the first operand, whatever the others (div, mul by a number, neg)."""
    lines = shard_lines(call)
    if call.args and isinstance(call.args[0], Meta) and call.get("rounding_mode") is None:
        others = [R] * (len(call.tensors) - 1)
        lines += [line([p, *others], p) for p in (P, AVG)]
    return lines


def monotone(call: OpCall, *, flips: bool = False) -> list[AxisRule]:
    """Non-decreasing in its only tensor: a pending minimum or maximum stays one (or flips, for neg)."""
    lines = shard_lines(call)
    if len(call.tensors) == 1:
        lines += [line([MIN], MAX if flips else MIN), line([MAX], MIN if flips else MAX)]
    return lines


def overwrite(call: OpCall) -> list[AxisRule]:
    """copy: the second operand in the first one's place, whatever that held."""
    return [*shard_lines(call), *(line([p, p], p) for p in (P, AVG, MIN, MAX))]


def both(*rules: Callable[[OpCall], list[AxisRule]]) -> Callable[[OpCall], list[AxisRule]]:
    """The lines of several rules, each once."""

    def combined(call: OpCall) -> list[AxisRule]:
        return list(dict.fromkeys(entry for rule in rules for entry in rule(call)))

    return combined


def extremum(pending: Partial) -> Callable[[OpCall], list[AxisRule]]:
    """maximum and minimum: two pending maxima (or minima) are one."""
    return lambda call: [*shard_lines(call), line([pending] * len(call.tensors), pending)]


def pointwise_meta(call: OpCall) -> tuple[OutMeta, ...]:
    """Broadcast shape; strides of the first operand of that shape, as torch does for dense operands."""
    shape = broadcast_shape(call)
    for meta in call.tensors:
        if meta.shape == shape:
            dense = contiguous(shape)
            if meta.stride == dense.stride:
                return (dense,)
            order = sorted(range(len(shape)), key=lambda d: (-meta.stride[d], d))
            return (_dense(shape, order),)
    return (contiguous(shape),)


def _dense(shape: tuple[int, ...], order: list[int]) -> OutMeta:
    stride = [0] * len(shape)
    step = 1
    for dim in reversed(order):
        stride[dim] = step
        step *= max(shape[dim], 1)
    return OutMeta(shape, tuple(stride))


ELEMENTWISE = Rule(elementwise, pointwise_meta)
ADDITIVE = Rule(additive, pointwise_meta)
BILINEAR = Rule(bilinear, pointwise_meta)
LINEAR = Rule(linear_in_first, pointwise_meta)
MONOTONE = Rule(monotone, pointwise_meta)
NEGATION = Rule(both(linear_in_first, partial(monotone, flips=True)), pointwise_meta)
COPY = Rule(both(additive, linear_in_first, monotone), pointwise_meta)
MAXIMUM = Rule(extremum(MAX), pointwise_meta)
MINIMUM = Rule(extremum(MIN), pointwise_meta)

RULES: dict[str, Rule] = {
    **dict.fromkeys(("add.Tensor", "sub.Tensor", "rsub.Tensor"), ADDITIVE),
    **dict.fromkeys(("mul.Tensor",), BILINEAR),
    **dict.fromkeys(("div.Tensor", "mul.Scalar", "div.Scalar", "true_divide.Tensor"), LINEAR),
    **dict.fromkeys(("neg.default", "negative.default"), NEGATION),
    **dict.fromkeys(("clone.default", "detach.default", "alias.default", "positive.default"), COPY),
    "copy.default": Rule(overwrite, pointwise_meta),
    "maximum.default": MAXIMUM,
    "minimum.default": MINIMUM,
    **dict.fromkeys(
        (
            "relu.default", "exp.default", "exp2.default", "expm1.default", "log.default", "log2.default",
            "log10.default", "log1p.default", "sqrt.default", "sigmoid.default", "tanh.default", "floor.default",
            "ceil.default", "trunc.default", "round.default", "sgn.default", "sign.default", "erf.default",
            "atan.default", "asinh.default", "sinh.default", "clamp.default", "clamp_min.default",
            "clamp_max.default", "hardtanh.default", "leaky_relu.default", "relu6.default", "softplus.default",
        ),
        MONOTONE,
    ),
}  # fmt: skip
