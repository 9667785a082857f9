"""Scans, sorts and searches along a dim: the other dims may be sharded.

Scans and topk over a sharded dim have plans of their own; a sort sees its dim whole (another dim is sharded where
there is one). Searches and histograms take their values sharded in any way.
"""

from __future__ import annotations

from longmesh.rules.rule import (
    AxisRule,
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
from longmesh.spec import Partial, Placement


def other_dims(call: OpCall) -> list[AxisRule]:
    """Every dim but the op's own may be sharded, the same in all outputs."""
    dim = call.dim()
    count = len(call.outputs)
    return [line([S(d)], [S(d)] * count) for d in range(call.tensors[0].ndim) if d != dim]


def linear_scan(call: OpCall) -> list[AxisRule]:
    """cumsum: also of a pending sum or average."""
    return [*other_dims(call), *(line([p], p) for p in (P, Partial("avg")))]


def same_shape(call: OpCall) -> tuple[OutMeta, ...]:
    return (contiguous(call.tensors[0].shape),) * call.num_returns


def search_lines(call: OpCall) -> list[AxisRule]:
    """searchsorted: sharded values in a replicated sequence, or rows of both sharded the same way."""
    sequence: Meta = call["sorted_sequence"]
    values = call["self"]
    if not isinstance(values, Meta):
        return []
    sorter = [call["sorter"]] if isinstance(call.get("sorter"), Meta) else []
    lines: list[AxisRule] = []
    for dim in range(values.ndim):
        shared = sequence.ndim > 1 and dim < values.ndim - 1
        other: Placement = S(dim) if shared else R
        lines.append(line([other, S(dim), *[other] * len(sorter)], S(dim)))
    return lines


def bucket_lines(call: OpCall) -> list[AxisRule]:
    """bucketize: each value on its own."""
    values = call["self"]
    return [line([S(d), R], S(d)) for d in range(values.ndim)] if isinstance(values, Meta) else []


def search_meta(call: OpCall) -> tuple[OutMeta, ...]:
    sequence, values = call["sorted_sequence"], call["self"]
    if isinstance(values, Meta) and sequence.ndim > 1 and sequence.shape[:-1] != values.shape[:-1]:
        refuse_shapes(call, "a sequence of several rows needs values of the same sizes but for the last")
    return values_meta(call)


def values_meta(call: OpCall) -> tuple[OutMeta, ...]:
    values = call["self"]
    return (contiguous(values.shape if isinstance(values, Meta) else ()),)


def histogram_lines(call: OpCall) -> list[AxisRule]:
    """histc: counts add up, once the bins don't depend on which values a rank has."""
    if call["min"] == call["max"]:
        return []
    return [line([S(d)], P) for d in range(call.tensors[0].ndim)]


def histogram_meta(call: OpCall) -> tuple[OutMeta, ...]:
    return (contiguous((call["bins"],)),)


SCAN = Rule(other_dims, same_shape)

RULES: dict[str, Rule] = {
    "cumsum.default": Rule(linear_scan, same_shape),
    **dict.fromkeys(("cumprod.default", "logcumsumexp.default", "cummax.default", "cummin.default"), SCAN),
    **dict.fromkeys(("sort.default", "sort.stable", "topk.default"), Rule(other_dims)),
    **dict.fromkeys(("searchsorted.Tensor", "searchsorted.Scalar"), Rule(search_lines, search_meta)),
    **dict.fromkeys(("bucketize.Tensor", "bucketize.Scalar"), Rule(bucket_lines, values_meta)),
    "histc.default": Rule(histogram_lines, histogram_meta),
}
