"""Scans over a cut dim: every rank scans its piece, the totals are gathered, and what lies before ours is added.

    cumsum 1 2 | 3 4   ->   local 1 3 | 3 7, totals 3 7   ->   1 3 | 3+3 3+7

A rank with an empty piece has no total; which ranks those are follows from the layout. Histograms whose
range is that of the values find it over all ranks first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from longmesh.comm import comm_of
from longmesh.tensor.dispatch import USUAL, Handler, dispatch
from longmesh.tensor.dtensor import DTensor
from longmesh.tensor.meta import contiguous_stride
from longmesh.tensor.ops.pieces import as_dims, bind, cutting_axes, gather_members, reduced

aten = torch.ops.aten

Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def scanning(
    scan: Callable[..., torch.Tensor], reduce: Callable[..., torch.Tensor], combine: Combine
) -> Handler:
    """A handler of an associative scan: `reduce` gives the total of gathered totals along dim 0."""

    def handler(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = bind(func, args, kwargs)
        x: DTensor = given["self"]
        dims = as_dims(given["dim"], x.ndim)
        if not x.numel() or not cutting_axes(x._layout, dims):
            return USUAL
        x = _ready(x, given.get("dtype"))
        (dim,) = dims
        local = scan(x._local_tensor, dim)
        before, totals = _totals_before(x, dim, _last(local, dim))
        if before:
            local = combine(reduce(totals[before], 0), local)
        return _wrapped(local, x)

    return handler


def _ready(x: DTensor, dtype: torch.dtype | None) -> DTensor:
    """Without pending reductions, in the element type of the result: integers are scanned as int64."""
    x = reduced(x)
    wanted = dtype or (x.dtype if x.is_floating_point() or x.is_complex() else torch.int64)
    return x if x.dtype is wanted else x.to(wanted)  # pyright: ignore[reportReturnType]


def _last(scanned: torch.Tensor, dim: int) -> torch.Tensor:
    """The last entry along `dim`: the total of a scan; zeros stand for that of an empty piece."""
    if scanned.shape[dim]:
        return scanned.narrow(dim, scanned.shape[dim] - 1, 1)
    return scanned.new_zeros([1 if d == dim else n for d, n in enumerate(scanned.shape)])


def _totals_before(x: DTensor, dim: int, total: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    """All ranks' totals, and which of them belong to pieces before ours, in order."""
    layout, size = x._layout, x.shape[dim]
    totals, members = gather_members(total, x, cutting_axes(layout, (dim,)))
    start, _ = layout.interval(dim, size, comm_of(x._mesh).coordinate)
    pieces = [layout.interval(dim, size, where) for where in members]
    before = [i for i, (first, length) in enumerate(pieces) if length and first < start]
    return sorted(before, key=lambda i: pieces[i][0]), totals


def _wrapped(local: torch.Tensor, x: DTensor) -> DTensor:
    return DTensor(local, x._mesh, x._layout, x.shape, contiguous_stride(x.shape))


def running_extremum(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """cummax, cummin: values and where they are; a later equal value replaces an earlier one, a NaN stays."""
    x, dim = args
    dims = as_dims(dim, x.ndim)
    if not x.numel() or not cutting_axes(x._layout, dims):
        return USUAL
    x = reduced(x)
    (dim,) = dims
    is_max = func is aten.cummax.default
    scan: Callable[..., tuple[torch.Tensor, torch.Tensor]] = torch.cummax if is_max else torch.cummin
    values, indices = scan(x._local_tensor, dim)
    start, _ = x._layout.interval(dim, x.shape[dim], comm_of(x._mesh).coordinate)
    indices = indices + int(start)
    before, tops = _totals_before(x, dim, _last(values, dim))
    _, places = _totals_before(x, dim, _last(indices, dim))
    if before:
        earlier, which = scan(tops[before], 0)
        best, place = earlier[-1], places[before].gather(0, which[-1:])[0]
        is_newer = values >= best if is_max else values <= best
        is_newer = values.isnan() | (is_newer & ~best.isnan())
        values, indices = torch.where(is_newer, values, best), torch.where(is_newer, indices, place)
    return _wrapped(values, x), _wrapped(indices, x)


def histogram(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """histc: without a range it is that of all values."""
    given = bind(func, args, kwargs)
    x: DTensor = given["self"]
    low, high = given["min"], given["max"]
    if low != high or not x.numel() or x._layout.is_replicated:
        return USUAL
    low, high = (reduced(v)._local_tensor.item() for v in torch.aminmax(reduced(x)))
    if low == high:
        low, high = low - 1, high + 1
    return dispatch.run(func, (x, given["bins"], low, high), {})


HANDLERS: dict[OpOverload, Handler] = {
    aten.cumsum.default: scanning(torch.cumsum, torch.sum, torch.add),
    aten.cumprod.default: scanning(torch.cumprod, torch.prod, torch.mul),
    aten.logcumsumexp.default: scanning(torch.logcumsumexp, torch.logsumexp, torch.logaddexp),
    aten.cummax.default: running_extremum,
    aten.cummin.default: running_extremum,
    aten.histc.default: histogram,
}
