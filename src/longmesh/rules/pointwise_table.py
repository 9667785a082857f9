"""The pointwise ops by kind. An op that torch tags as pointwise and that is not listed is sharded, never pending."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from longmesh._torch import aten
from longmesh.rules.lookup import copy_pending
from longmesh.rules.pointwise import (
    alpha,
    convert,
    copy_meta,
    fill_where,
    first_meta,
    identity,
    linear,
    lookup,
    minus_alpha,
    number,
    ordered,
    pending_lines,
    pointwise,
    scaled,
    selecting,
    shard_lines,
    summed,
)
from longmesh.rules.rule import MAX, MIN, AxisRule, OpCall, Rule, like
from longmesh.spec import Partial

ELEMENTWISE = pointwise(shard_lines)
INCREASING = pointwise(ordered((0,)))
DECREASING = pointwise(ordered((0,), sign=lambda call: -1))
LINEAR = pointwise(linear((0,)))  # a gradient through a saved tensor, a quotient
SCALED = pointwise(scaled((0,), (1,), by_zero=True), ordered((0,), sign=lambda call: number(call, "other")))
SAME = Rule(identity, lambda call: (like(call.tensors[0]),))


_SUM = linear((0, 1), affine=((0,), (1,)))
ADD = pointwise(_SUM, ordered((0,)), ordered((1,), sign=alpha))
SUB = pointwise(_SUM, ordered((0,)), ordered((1,), sign=minus_alpha))
RSUB = pointwise(_SUM, ordered((0,), sign=minus_alpha), ordered((1,)))
PLUS_NUMBER = pointwise(linear(affine=((0,),)), ordered((0,)))
NUMBER_MINUS = pointwise(linear(affine=((0,),)), ordered((0,), sign=minus_alpha))


def extremum(pending: Partial) -> Rule:
    """maximum and minimum: two pending ones are one; either operand's order is kept."""

    def joint(call: OpCall) -> list[AxisRule]:
        return pending_lines(call, [(0, 1)], pending, pending)

    return pointwise(selecting((0,), (1,)), joint)


_INCREASING = """
    asinh.default atan.default ceil.default clamp.default clamp_max.default clamp_min.default erf.default exp.default
    exp2.default expm1.default floor.default hardsigmoid.default hardtanh.default relu.default relu6.default
    round.decimals round.default sgn.default sigmoid.default sign.default sinh.default softplus.default
    tanh.default trunc.default
"""

_GRADIENTS = """
    elu_backward.default gelu_backward.default hardshrink_backward.default hardsigmoid_backward.default
    hardswish_backward.default hardtanh_backward.default leaky_relu_backward.default logit_backward.default
    mish_backward.default native_dropout_backward.default rrelu_with_noise_backward.default
    sigmoid_backward.default silu_backward.default softplus_backward.default softshrink_backward.default
    tanh_backward.default threshold_backward.default _prelu_kernel_backward.default
"""

_UNTAGGED = """
    fake_quantize_per_tensor_affine_cachemask.default floor_divide.default floor_divide.Scalar hardswish.default
    isin.Tensor_Scalar polar.default _prelu_kernel.default special_ndtr.default
"""

RULES: dict[str, Rule] = {
    **dict.fromkeys(_INCREASING.split(), INCREASING),
    **dict.fromkeys(("erfc.default", "special_erfcx.default"), DECREASING),
    **dict.fromkeys(_GRADIENTS.split(), LINEAR),
    **dict.fromkeys(_UNTAGGED.split(), ELEMENTWISE),
    **dict.fromkeys(("positive.default", "lift_fresh.default"), SAME),
    **dict.fromkeys(
        ("detach.default", "alias.default"), replace(SAME, program=copy_pending, keeps_lookups=True)
    ),
    "clone.default": Rule(identity, copy_meta, program=copy_pending, keeps_lookups=True),
    **dict.fromkeys(("_to_copy.default", "prims.convert_element_type.default"), Rule(convert, copy_meta)),
    "copy.default": Rule(identity, first_meta),
    "add.Tensor": ADD,
    "sub.Tensor": SUB,
    "rsub.Tensor": RSUB,
    "add.Scalar": PLUS_NUMBER,
    "sub.Scalar": PLUS_NUMBER,
    "rsub.Scalar": NUMBER_MINUS,
    **dict.fromkeys(("mul.Tensor", "mul.Scalar"), SCALED),
    **dict.fromkeys(
        ("div.Tensor", "div.Scalar", "true_divide.Tensor"),
        pointwise(scaled((0,), by_zero=False), ordered((0,), sign=lambda call: number(call, "other"))),
    ),
    **dict.fromkeys(
        ("neg.default", "negative.default"), pointwise(linear((0,)), ordered((0,), sign=lambda call: -1))
    ),
    **dict.fromkeys(("deg2rad.default", "rad2deg.default"), pointwise(linear((0,)), ordered((0,)))),
    "leaky_relu.default": pointwise(
        ordered((0,), sign=lambda call: float(number(call, "negative_slope") > 0))
    ),
    "ldexp.Tensor": LINEAR,
    "conj_physical.default": LINEAR,
    "_neg_view.default": Rule(linear((0,)), first_meta, local_op=lambda call, view: aten.neg.default),
    "complex.default": pointwise(_SUM),
    **dict.fromkeys(
        ("where.self", "prims.where.default"),
        pointwise(summed((1, 2)), selecting((1,), (2,), (1, 2))),
    ),
    # How torch finds the sizes of a sum or product with zeros that take no memory.
    **dict.fromkeys([f"prims.{name}.default" for name in ("add", "sub", "mul", "div")], ELEMENTWISE),
    "masked_fill.Scalar": pointwise(fill_where),
    "masked_fill.Tensor": pointwise(summed((0, 2)), selecting((0,), (2,), (0, 2))),
    "lerp.Scalar": pointwise(_SUM),
    "lerp.Tensor": pointwise(_SUM),
    "addcmul.default": pointwise(linear((0, 1), (0, 2), affine=((0,), (1,), (2,)))),
    "addcdiv.default": pointwise(_SUM),
    **dict.fromkeys(("maximum.default", "fmax.default", "clamp_min.Tensor"), extremum(MAX)),
    **dict.fromkeys(("minimum.default", "fmin.default", "clamp_max.Tensor"), extremum(MIN)),
    "clamp.Tensor": pointwise(selecting((0,))),
    **dict.fromkeys(("logaddexp.default", "logaddexp2.default"), pointwise(ordered((0,), (1,)))),
    **dict.fromkeys(("bucketize.Tensor", "isin.Tensor_Tensor"), Rule(lookup, first_meta)),
}

# Tagged pointwise by torch, but random or not a tensor.
_NOT_POINTWISE = frozenset(("equal.default", "rrelu.default"))


@functools.cache
def by_tag(name: str) -> Rule | None:
    """The rule of an op that is not listed, if torch says that it is pointwise. `name` as in the table."""
    parts = name.split(".")
    namespace, packet, overload = ["aten", *parts][-3:] if len(parts) > 1 else ("aten", name, "default")
    try:
        op = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except AttributeError:
        return None
    return ELEMENTWISE if torch.Tag.pointwise in op.tags and name not in _NOT_POINTWISE else None
