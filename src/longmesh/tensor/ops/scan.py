"""Scans over a sharded dim: every rank scans its piece, the totals are gathered, and what comes before ours is added.

    cumsum 1 2 | 3 4   ->   local 1 3 | 3 7, totals 3 7   ->   1 3 | 3+3 3+7

A rank with an empty piece has no total; which ranks those are follows from the layout. Histograms whose
range is that of the values find it over all ranks first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from longmesh._torch import OpOverload, aten
from longmesh.spec import Partial
from longmesh.tensor.make_plan import Family
from longmesh.tensor.op_facts import bind
from longmesh.tensor.ops.pieces import as_dims, reduced_layout, sharding_axes
from longmesh.tensor.planned import Part, Planned
from longmesh.tensor.planner import USUAL, Planner

Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def scanning(
    scan: Callable[..., torch.Tensor], reduce: Callable[..., torch.Tensor], combine: Combine
) -> Family:
    """An associative scan: `reduce` gives the total of gathered totals along dim 0."""

    def family(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = bind(func, args, kwargs)
        x: Planned = given["self"]
        dims = as_dims(given["dim"], x.ndim)
        if not x.numel() or not sharding_axes(x._layout, dims):
            return USUAL
        x = _ready(p, x, given.get("dtype"))
        (dim,) = dims
        local = p.local(scan, x, dim)
        before, totals = _totals_before(p, x, dim, local, x.dtype)
        if before:
            local = p.local(lambda t, s: combine(reduce(t[before], 0), s), totals, local)
        return p.wrap(local, x)

    return family


def _ready(p: Planner, x: Planned, dtype: torch.dtype | None) -> Planned:
    """Without pending reductions, in the element type of the result: integers are scanned as int64."""
    x = p.reduced(x)
    wanted = dtype or (x.dtype if x.is_floating_point() or x.is_complex() else torch.int64)
    return x if x.dtype is wanted else x.to(wanted)  # pyright: ignore[reportReturnType]


def _last(scanned: torch.Tensor, dim: int) -> torch.Tensor:
    """The last entry along `dim`: the total of a scan; zeros stand for that of an empty piece."""
    if scanned.shape[dim]:
        return scanned.narrow(dim, scanned.shape[dim] - 1, 1)
    return scanned.new_zeros([1 if d == dim else n for d, n in enumerate(scanned.shape)])


def _totals_before(
    p: Planner, x: Planned, dim: int, scanned: Part, dtype: torch.dtype
) -> tuple[list[int], Part]:
    """Which ranks' pieces come before ours, in order, and the totals of all."""
    axes = sharding_axes(x._layout, (dim,))
    shape = [1 if d == dim else n for d, n in enumerate(x.local_shape)]
    totals = p.gather(p.local(_last, scanned, dim), x, axes, shape, dtype)
    start, _ = x.interval(dim)
    pieces = [x.interval(dim, where) for where in p.members(x, axes)]
    before = [i for i, (first, length) in enumerate(pieces) if length and first < start]
    return sorted(before, key=lambda i: pieces[i][0]), totals


def running_extremum(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """cummax, cummin: values and where they are; a later equal value replaces an earlier one, a NaN stays."""
    x, dim = args
    dims = as_dims(dim, x.ndim)
    if not x.numel() or not sharding_axes(x._layout, dims):
        return USUAL
    x = p.reduced(x)
    (dim,) = dims
    is_max = func is aten.cummax.default
    scan: Callable[..., tuple[torch.Tensor, torch.Tensor]] = torch.cummax if is_max else torch.cummin
    start, _ = x.interval(dim)
    values, found = p.locals(2, scan, x, dim)
    indices = p.local(torch.add, found, start)
    before, tops = _totals_before(p, x, dim, values, x.dtype)
    _, places = _totals_before(p, x, dim, indices, torch.int64)

    def combine(
        values: torch.Tensor, indices: torch.Tensor, tops: torch.Tensor, places: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        earlier, which = scan(tops[before], 0)
        best, place = earlier[-1], places[before].gather(0, which[-1:])[0]
        is_newer = values >= best if is_max else values <= best
        is_newer = values.isnan() | (is_newer & ~best.isnan())
        return torch.where(is_newer, values, best), torch.where(is_newer, indices, place)

    if before:
        values, indices = p.locals(2, combine, values, indices, tops, places)
    return p.wrap(values, x), p.wrap(indices, x, dtype=torch.int64)


def histogram(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """histc: without a range it is that of all values."""
    given = bind(func, args, kwargs)
    x: Planned = given["self"]
    bins, low, high = given["bins"], given["min"], given["max"]
    if low != high or not x.numel() or x._layout.is_replicated:
        return USUAL
    x = p.reduced(x)
    low, high = (p.reduced(v) for v in torch.aminmax(x))

    def count(local: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        first, last = low.item(), high.item()
        if first == last:
            first, last = first - 1, first + 1
        return torch.histc(local, bins, first, last)

    pending = reduced_layout(x._layout, range(x.ndim), False, Partial())
    return p.wrap(p.local(count, x, low, high), x, layout=pending, shape=(bins,))


FAMILIES: dict[OpOverload, Family] = {
    aten.cumsum.default: scanning(torch.cumsum, torch.sum, torch.add),
    aten.cumprod.default: scanning(torch.cumprod, torch.prod, torch.mul),
    aten.logcumsumexp.default: scanning(torch.logcumsumexp, torch.logsumexp, torch.logaddexp),
    aten.cummax.default: running_extremum,
    aten.cummin.default: running_extremum,
    aten.histc.default: histogram,
}
