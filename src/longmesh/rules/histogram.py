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
from longmesh.spec import Layout


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


def histogram(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.histogram by a number of bins, or by edges: weights are laid out as the values are, and counts add up."""
    given = arguments_of(func, args, kwargs)
    x: Planned = given["self"]
    if not x.numel() or not x.global_layout.shard_dims:
        return p.on_whole_tensors(func, args, kwargs)
    x = p.reduced(x)
    weight = given["weight"]
    weight = weight if weight is None else p.redistribute(p.reduced(weight), x.global_layout)
    bins, whole = given["bins"], Layout.replicated(x.global_layout.mesh)
    if isinstance(bins, Planned):
        count, edges = (
            bins.shape[0] - 1,
            p.wrap(p.local(torch.clone, p.replicated(bins)), x, layout=whole, shape=bins.shape),
        )
        hist = p.local(_count_between, x, edges, weight)
    else:
        low, high = given["range"] or (p.reduced(v) for v in torch.aminmax(x))
        count = bins
        hist, part = p.locals(2, _count_bins, x, bins, low, high, weight)
        edges = p.wrap(part, x, layout=whole, shape=(count + 1,))
    pending = reduced_layout(x.global_layout, range(x.ndim), False, P)
    total = p.wrap(hist, x, layout=pending, shape=(count,))
    if not given["density"]:
        return total, edges
    total = p.reduced(total)
    return p.wrap(p.local(_density, total, edges), total), edges


def _count_between(local: torch.Tensor, edges: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    return torch.histogram(local.contiguous(), edges, weight=_dense(weight)).hist


def _count_bins(
    local: torch.Tensor, bins: int, low: Any, high: Any, weight: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    found = torch.histogram(local.contiguous(), bins, range=(float(low), float(high)), weight=_dense(weight))
    return found.hist, found.bin_edges


def _dense(weight: torch.Tensor | None) -> torch.Tensor | None:
    return weight if weight is None else weight.contiguous()


def _density(hist: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    return hist / hist.sum() / edges.diff()


RULES: dict[str, Rule] = {
    "histc.default": Rule(histc_lines, histc_meta, program=histc),
    **dict.fromkeys(("histogram.bins_tensor", "histogram.bin_ct"), Rule(program=histogram)),
}
