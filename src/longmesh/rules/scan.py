"""Scans: every other dim may be sharded, and the scanned one by a program.

Every rank scans its piece, the totals are gathered, and what comes before ours is added:

    cumsum 1 2 | 3 4   ->   local 1 3 | 3 7, totals 3 7   ->   1 3 | 3+3 3+7

A rank with an empty piece has no total; which ranks those are follows from the layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from longmesh._torch import OpOverload, aten
from longmesh.rules.pieces import as_dims, sharding_axes
from longmesh.rules.planned import Part, Planned
from longmesh.rules.rule import Program, Rule, arguments_of, same_shape
from longmesh.rules.view import LINEAR, along_others
from longmesh.rules.writer import Writer

Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def scanning(
    scan: Callable[..., torch.Tensor], reduce: Callable[..., torch.Tensor], combine: Combine
) -> Program:
    """An associative scan: `reduce` gives the total of gathered totals along dim 0."""

    def program(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = arguments_of(func, args, kwargs)
        x: Planned = given["self"]
        dims = as_dims(given["dim"], x.ndim)
        if not x.numel() or not sharding_axes(x.global_layout, dims):
            return p.by_lines(func, args, kwargs)
        x = _ready(p, x, given.get("dtype"))
        (dim,) = dims
        local = p.local(scan, x, dim)
        before, totals = _totals_before(p, x, dim, local, x.dtype)
        if before:
            local = p.local(_after, totals, local, before, reduce, combine)
        return p.wrap(local, x)

    return program


def _after(
    totals: torch.Tensor,
    scanned: torch.Tensor,
    before: list[int],
    reduce: Callable[..., torch.Tensor],
    combine: Combine,
) -> torch.Tensor:
    return combine(reduce(totals[before], 0), scanned)


def _ready(p: Writer, x: Planned, dtype: torch.dtype | None) -> Planned:
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
    p: Writer, x: Planned, dim: int, scanned: Part, dtype: torch.dtype
) -> tuple[list[int], Part]:
    """Which ranks' pieces come before ours, in order, and the totals of all."""
    axes = sharding_axes(x.global_layout, (dim,))
    shape = [1 if d == dim else n for d, n in enumerate(x.local_shape)]
    totals = p.gather(p.local(_last, scanned, dim), x, axes, shape, dtype)
    start, _ = x.interval(dim)
    pieces = [x.interval(dim, where) for where in p.members(x, axes)]
    before = [i for i, (first, length) in enumerate(pieces) if length and first < start]
    return sorted(before, key=lambda i: pieces[i][0]), totals


def running_extremum(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """cummax, cummin: values and where they are; a later equal value replaces an earlier one, a NaN stays."""
    x, dim = args
    dims = as_dims(dim, x.ndim)
    if not x.numel() or not sharding_axes(x.global_layout, dims):
        return p.by_lines(func, args, kwargs)
    x = p.reduced(x)
    (dim,) = dims
    is_max = func is aten.cummax.default
    scan: Callable[..., tuple[torch.Tensor, torch.Tensor]] = torch.cummax if is_max else torch.cummin
    start, _ = x.interval(dim)
    values, found = p.locals(2, scan, x, dim)
    indices = p.local(torch.add, found, start)
    before, tops = _totals_before(p, x, dim, values, x.dtype)
    _, places = _totals_before(p, x, dim, indices, torch.int64)
    if before:
        values, indices = p.locals(2, _running, values, indices, tops, places, before, is_max)
    return p.wrap(values, x), p.wrap(indices, x, dtype=torch.int64)


def _running(
    values: torch.Tensor,
    indices: torch.Tensor,
    tops: torch.Tensor,
    places: torch.Tensor,
    before: list[int],
    is_max: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    earlier, which = (torch.cummax if is_max else torch.cummin)(tops[before], 0)
    best, place = earlier[-1], places[before].gather(0, which[-1:])[0]
    is_newer = values >= best if is_max else values <= best
    is_newer = values.isnan() | (is_newer & ~best.isnan())
    return torch.where(is_newer, values, best), torch.where(is_newer, indices, place)


CUMSUM = scanning(torch.cumsum, torch.sum, torch.add)
CUMPROD = scanning(torch.cumprod, torch.prod, torch.mul)
LOGCUMSUMEXP = scanning(torch.logcumsumexp, torch.logsumexp, torch.logaddexp)

RULES: dict[str, Rule] = {
    "cumsum.default": Rule(along_others(kinds=LINEAR), same_shape, program=CUMSUM),
    "cumprod.default": Rule(along_others(kinds=()), same_shape, program=CUMPROD),
    "logcumsumexp.default": Rule(along_others(kinds=()), same_shape, program=LOGCUMSUMEXP),
    **{
        f"{name}.default": Rule(along_others(kinds=()), same_shape, program=running_extremum)
        for name in ("cummax", "cummin")
    },
}
