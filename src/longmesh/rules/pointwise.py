"""How pointwise ops are distributed: any dim may be sharded, the same one in every operand that has it.

An operand that broadcasts along the sharded dim (size 1, or the dim missing) is replicated on that axis.
Pending reductions stay pending where the op allows it: sums through linear ops, averages also where a
constant is added, minima and maxima through ops that keep (or turn around) the order.

Pitfalls: a function that is not defined everywhere (log, sqrt) keeps no maximum, since the terms of a maximum may
lie outside its domain; arithmetic on integers keeps none either, since a shard padded with the smallest
integer would wrap around. Which op is of which kind is listed in `pointwise_table`.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Iterable, Sequence

import torch

from longmesh.errors import LongmeshError
from longmesh.rules.rule import (
    AVG,
    MAX,
    MIN,
    PRODUCT,
    AxisRule,
    Meta,
    OpCall,
    OutMeta,
    P,
    R,
    Rule,
    RuleFunction,
    S,
    Shape,
    contiguous,
    line,
)
from longmesh.spec import Partial, Placement
from longmesh.spec.strides import dense_stride

Group = tuple[int, ...]


def broadcast_shape(call: OpCall) -> Shape:
    return broadcast([meta.shape for meta in call.tensors])


def broadcast(shapes: Sequence[Shape]) -> Shape:
    """The shape that all of `shapes` broadcast to. Parts of sizes that don't fit may well fit on some ranks, so it is
    here, of the whole, that they are refused."""
    if shapes and all(shape == shapes[0] for shape in shapes[1:]):
        return shapes[0]
    ndim = max(map(len, shapes), default=0)
    result = [1] * ndim
    for shape in shapes:
        for dim, size in enumerate(shape, ndim - len(shape)):
            if size != 1:
                if result[dim] not in (1, size):
                    raise LongmeshError(
                        f"shapes {', '.join(str(tuple(x)) for x in shapes)} don't broadcast: in dim {dim} of {ndim} "
                        f"sizes {result[dim]} and {size} meet; sizes must be equal, or 1"
                    )
                result[dim] = size
    return tuple(result)


def shard_of(meta: Meta, dim: int, ndim: int) -> Placement:
    """The placement of an operand on an axis that shards dim `dim` of a broadcast result of `ndim` dims."""
    own = dim - (ndim - meta.ndim)
    return R if own < 0 or meta.shape[own] == 1 else S(own)


def shard_lines(call: OpCall) -> list[AxisRule]:
    """One line per dim of the broadcast result; one of size 1 is as any other, in operands that have it."""
    shape = broadcast_shape(call)
    ndim = len(shape)

    def operand(meta: Meta, dim: int, size: int) -> Placement:
        own = dim - (ndim - meta.ndim)
        return S(own) if own >= 0 and meta.shape[own] == size else R

    return [
        line([operand(meta, dim, size) for meta in call.tensors], (S(dim),) * len(call.outputs))
        for dim, size in enumerate(shape)
    ]


def pending_lines(call: OpCall, groups: Iterable[Group], before: Partial, after: Partial) -> list[AxisRule]:
    """Lines in which the operands of a group are pending together, and the others replicated."""
    count = range(len(call.tensors))
    outputs = (after,) * len(call.outputs)
    return [
        line([before if i in group else R for i in count], outputs)
        for group in groups
        if all(i < len(call.tensors) and _may_be_pending(call.tensors[i], before) for i in group)
    ]


def _may_be_pending(meta: Meta, pending: Partial) -> bool:
    if pending.reduce_op == "avg":
        return meta.dtype.is_floating_point or meta.dtype.is_complex
    if pending.reduce_op in ("min", "max"):
        return not meta.dtype.is_complex
    return meta.dtype is not torch.bool


def together(*rules: RuleFunction) -> RuleFunction:
    """The lines of several rules, each once."""

    def combined(call: OpCall) -> list[AxisRule]:
        return list(dict.fromkeys(entry for rule in rules for entry in rule(call)))

    return combined


# -- kinds of ops ----------------------------------------------------------------------------------


def linear(*groups: Group, affine: Sequence[Group] = ()) -> RuleFunction:
    """Linear in the operands of each group together. An average also passes where only the operands of an
    `affine` group are pending and the rest is a constant: x + 1 of an average, but not of a sum."""

    def rule(call: OpCall) -> list[AxisRule]:
        return [
            *shard_lines(call),
            *pending_lines(call, groups, P, P),
            *pending_lines(call, (*groups, *affine), AVG, AVG),
        ]

    return rule


def summed(*groups: Group) -> RuleFunction:
    """Linear in the operands of each group together, one of which may be as large as numbers get (a mask's filling):
    a sum stays pending, an average, whose terms are added up before they are divided, does not."""

    def rule(call: OpCall) -> list[AxisRule]:
        return [*shard_lines(call), *pending_lines(call, groups, P, P)]

    return rule


def scaled(*groups: Group, by_zero: bool) -> RuleFunction:
    """Linear unless the factor `other` is a number that makes infinities, which terms don't add up to."""

    def rule(call: OpCall) -> list[AxisRule]:
        other = call.get("other")
        is_safe = isinstance(other, Meta) or (cmath.isfinite(other) and (by_zero or other != 0))
        return linear(*groups)(call) if is_safe else shard_lines(call)

    return rule


def ordered(*groups: Group, sign: Callable[[OpCall], float] = lambda call: 1) -> RuleFunction:
    """Non-decreasing in each group's operands (non-increasing where `sign` is negative, neither where it is
    zero): a pending minimum or maximum stays one, or becomes the other. For floating operands, and no other tensor
    or infinite number: terms are infinite where a rank has nothing, and inf - inf is not a number."""

    def rule(call: OpCall) -> list[AxisRule]:
        lines = shard_lines(call)
        direction = sign(call)
        if any(isinstance(a, float) and math.isinf(a) for a in (*call.args, *call.kwargs.values())):
            return lines
        usable = [
            g
            for g in groups
            if len(g) == len(call.tensors) > max(g)
            and all(call.tensors[i].dtype.is_floating_point for i in g)
        ]
        if direction > 0:
            lines += pending_lines(call, usable, MIN, MIN) + pending_lines(call, usable, MAX, MAX)
        elif direction < 0:
            lines += pending_lines(call, usable, MIN, MAX) + pending_lines(call, usable, MAX, MIN)
        return lines

    return rule


def selecting(*groups: Group) -> RuleFunction:
    """Returns one of its operands' elements or a constant, never a new number: order is kept for any dtype."""

    def rule(call: OpCall) -> list[AxisRule]:
        kept = pending_lines(call, groups, MIN, MIN) + pending_lines(call, groups, MAX, MAX)
        return [*shard_lines(call), *kept]

    return rule


def number(call: OpCall, name: str) -> float:
    """A numeric argument for its sign; 0 where it is a tensor, complex or not a number."""
    value = call.get(name)
    if isinstance(value, (bool, int, float)) and value == value:
        return float(value)
    return 0.0


def alpha(call: OpCall) -> float:
    return number(call, "alpha")


def minus_alpha(call: OpCall) -> float:
    return -number(call, "alpha")


def identity(call: OpCall) -> list[AxisRule]:
    """The same values again: whatever is pending stays so."""
    return [*shard_lines(call), *(line([p] * len(call.tensors), p) for p in (P, AVG, MIN, MAX, PRODUCT))]


def convert(call: OpCall) -> list[AxisRule]:
    """_to_copy. Sums survive a change to floats, or from integers to integers; order survives
    between floats. In half precision the terms of a sum would be rounded, by more than the sum is."""
    before = call.tensors[0].dtype
    after = call.get("dtype") or before
    if before == after:
        return identity(call)
    lines = shard_lines(call)
    from_int = not (before.is_floating_point or before.is_complex)
    to_float = (after.is_floating_point or after.is_complex) and (from_int or _is_exact_enough(before, after))
    if to_float or (from_int and after is not torch.bool):
        lines += pending_lines(call, [(0,)], P, P)
    if to_float:
        lines += pending_lines(call, [(0,)], AVG, AVG)
    if before.is_floating_point and after.is_floating_point:
        lines += pending_lines(call, [(0,)], MIN, MIN) + pending_lines(call, [(0,)], MAX, MAX)
    return lines


def _is_exact_enough(before: torch.dtype, after: torch.dtype) -> bool:
    return torch.finfo(after).eps <= max(torch.finfo(before).eps, torch.finfo(torch.float32).eps)


def fill_where(call: OpCall) -> list[AxisRule]:
    """masked_fill by a number: a sum stays pending where the number is zero, an average where it is not so large that
    its terms would overflow, an extremum always."""
    value = call["value"]
    return [
        *shard_lines(call),
        *(pending_lines(call, [(0,)], P, P) if value == 0 else ()),
        *(pending_lines(call, [(0,)], AVG, AVG) if abs(value) < 1e4 or cmath.isinf(value) else ()),
        *pending_lines(call, [(0,)], MIN, MIN),
        *pending_lines(call, [(0,)], MAX, MAX),
    ]


def lookup(call: OpCall) -> list[AxisRule]:
    """The first operand element by element against all of the others (isin, bucketize)."""
    others = [R] * (len(call.tensors) - 1)
    return [line([S(d), *others], S(d)) for d in range(call.tensors[0].ndim)]


# -- metas of the outputs ----------------------------------------------------------------------------


def pointwise_meta(call: OpCall) -> tuple[OutMeta, ...]:
    """Broadcast shape, and the strides that torch gives the result."""
    return (elementwise_meta(broadcast_shape(call), call.tensors),) * call.num_returns


def first_meta(call: OpCall) -> tuple[OutMeta, ...]:
    """Shaped as the first operand, whatever the others."""
    return (elementwise_meta(call.tensors[0].shape, call.tensors[:1]),)


def copy_meta(call: OpCall) -> tuple[OutMeta, ...]:
    """As the input lies in memory, or as `memory_format` says."""
    meta = call.tensors[0]
    wanted = call.get("memory_format")
    if wanted is torch.contiguous_format:
        return (contiguous(meta.shape),)
    if wanted is torch.channels_last or wanted is torch.channels_last_3d:
        return (OutMeta(meta.shape, dense_stride(meta.shape, [0, *range(2, meta.ndim), 1])),)
    return (elementwise_meta(meta.shape, (meta,)),)


def elementwise_meta(shape: tuple[int, ...], metas: Sequence[Meta]) -> OutMeta:
    """A dense result whose dims lie in memory in the order of the operands' strides, the first one that can
    tell deciding between two dims."""
    dense = contiguous(shape)
    if metas and metas[0].shape == shape and metas[0].stride == dense.stride:
        return dense
    if all(meta.shape == shape and is_contiguous(meta, dense) for meta in metas):
        return dense
    ndim = len(shape)
    strides: list[list[int]] = []
    for meta in metas:
        own = [0] * (ndim - meta.ndim)
        own += [
            0 if size == 1 != whole else step
            for size, step, whole in zip(meta.shape, meta.stride, shape[ndim - meta.ndim :], strict=True)
        ]
        strides.append(own)
    order = list(range(ndim - 1, -1, -1))  # fastest first
    for i in range(1, ndim):
        place = i
        for j in range(i - 1, -1, -1):
            verdict = _compare(order[j], order[place], strides, shape)
            if verdict > 0:
                order[j], order[place] = order[place], order[j]
                place = j
            elif verdict < 0:
                break
    return OutMeta(shape, dense_stride(shape, order[::-1]))


def is_contiguous(meta: Meta, dense: OutMeta) -> bool:
    """Dense in order; the stride of a dim of size 1 is never used."""
    return all(
        size == 1 or have == want
        for size, have, want in zip(meta.shape, meta.stride, dense.stride, strict=True)
    )


def _compare(left: int, right: int, strides: list[list[int]], shape: tuple[int, ...]) -> int:
    """Whether dim `left` lies faster in memory than `right` (-1), slower (1), or no operand can tell (0)."""
    for own in strides:
        if own[left] == 0 or own[right] == 0:
            continue
        if own[left] != own[right]:
            return -1 if own[left] < own[right] else 1
        if shape[left] > shape[right]:
            return 1
    return 0


def pointwise(first: RuleFunction, *others: RuleFunction) -> Rule:
    """The rule of a pointwise op: the lines of all kinds that it is of."""
    return Rule(together(first, *others) if others else first, pointwise_meta, reads_sizes=False)
