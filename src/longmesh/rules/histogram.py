"""Histograms: values may be sharded in any way, and only counts travel.

The counts of a range that is given add up. Without a range it is that of all values, which the program finds first.
"""

from __future__ import annotations

from typing import Any

import torch

from longmesh._torch import OpOverload
from longmesh.rules.pieces import reduced_layout
from longmesh.rules.planned import Planned
from longmesh.rules.rule import AxisRule, OpCall, OutMeta, P, Rule, S, arguments_of, contiguous, line
from longmesh.rules.writer import Writer


def histc_lines(call: OpCall) -> list[AxisRule]:
    """histc: counts add up, once the bins don't depend on which values a rank has."""
    if call["min"] == call["max"]:
        return []
    return [line([S(d)], P) for d in range(call.tensors[0].ndim)]


def histc_meta(call: OpCall) -> tuple[OutMeta, ...]:
    return (contiguous((call["bins"],)),)


def histc(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Without a range it is that of all values."""
    given = arguments_of(func, args, kwargs)
    x: Planned = given["self"]
    bins, low, high = given["bins"], given["min"], given["max"]
    if low != high or not x.numel() or x.global_layout.is_replicated:
        return p.by_lines(func, args, kwargs)
    x = p.reduced(x)
    low, high = (p.reduced(v) for v in torch.aminmax(x))
    pending = reduced_layout(x.global_layout, range(x.ndim), False, P)
    return p.wrap(p.local(_count, x, low, high, bins), x, layout=pending, shape=(bins,))


def _count(local: torch.Tensor, low: torch.Tensor, high: torch.Tensor, bins: int) -> torch.Tensor:
    first, last = low.item(), high.item()
    if first == last:
        first, last = first - 1, first + 1
    return torch.histc(local, bins, first, last)


RULES: dict[str, Rule] = {
    "histc.default": Rule(histc_lines, histc_meta, program=histc),
}
