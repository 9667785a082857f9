"""Sorts and searches along a dim: the other dims may be sharded.

A sort sees its dim whole (another dim is sharded where there is one). Searches take their values sharded in any way.
"""

from __future__ import annotations

from longmesh.rules.rule import (
    AxisRule,
    Meta,
    OpCall,
    OutMeta,
    R,
    Rule,
    S,
    contiguous,
    line,
    no_lines,
    refuse_shapes,
)
from longmesh.rules.view import along_others
from longmesh.spec import Placement


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


def search_meta(call: OpCall) -> tuple[OutMeta, ...]:
    sequence, values = call["sorted_sequence"], call["self"]
    if isinstance(values, Meta) and sequence.ndim > 1 and sequence.shape[:-1] != values.shape[:-1]:
        refuse_shapes(call, "a sequence of several rows needs values of the same sizes but for the last")
    return values_meta(call)


def values_meta(call: OpCall) -> tuple[OutMeta, ...]:
    values = call["self"]
    return (contiguous(values.shape if isinstance(values, Meta) else ()),)


RULES: dict[str, Rule] = {
    **dict.fromkeys(("sort.default", "sort.stable"), Rule(along_others(kinds=()))),
    **dict.fromkeys(("searchsorted.Tensor", "searchsorted.Scalar"), Rule(search_lines, search_meta)),
    "bucketize.Scalar": Rule(no_lines, values_meta),
}
