"""Reductions that say where: argmax, argmin, max and min along a dim, topk.

Over a sharded dim every rank sends its best and the global index of it; each picks among them, the lowest
index where values tie, as torch does. A NaN beats every number, as in torch.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from longmesh._torch import OpOverload, schema_of
from longmesh.rules.pieces import as_dims, reduced_layout, reduced_shape, sharding_axes, stand_in
from longmesh.rules.planned import Part, Planned
from longmesh.rules.reduction import reduce_lines, reduced_meta
from longmesh.rules.rule import Rule, arguments_of
from longmesh.rules.view import along_others
from longmesh.rules.writer import Writer
from longmesh.spec import Layout, Replicate

Found = tuple[torch.Tensor, torch.Tensor]


def is_ours(x: Planned, dims: tuple[int, ...]) -> bool:
    """Whether a dim is sharded that has elements and can be ordered; else the op runs by its lines."""
    return x.numel() > 0 and bool(sharding_axes(x.global_layout, dims)) and not x.is_complex()


def along_dim(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """max.dim, min.dim, argmax and argmin with a dim or without."""
    given = arguments_of(func, args, kwargs)
    x: Planned = given["self"]
    dims = as_dims(given["dim"], x.ndim)
    if not is_ours(x, dims):
        return p.by_lines(func, args, kwargs)
    x = p.reduced(x)
    keepdim, largest = given["keepdim"], "max" in schema_of(func).name
    if given["dim"] is None:
        shape: list[int] = []
        offset = tuple(map(int, x.global_layout.local_offset(x.shape, x.coordinate)))
        found = p.locals(2, _best_of_all, x, dims, largest, tuple(x.shape), offset)
    else:
        shape = [1 if d in dims else n for d, n in enumerate(x.local_shape)]
        found = p.locals(2, _best_along, x, dims[0], largest, x.interval(dims[0])[0])
    values, indices = _pick(p, found[0], found[1], x, dims, largest, shape)
    layout = reduced_layout(x.global_layout, dims, keepdim, Replicate())
    size = reduced_shape(x.shape, dims, keepdim)
    local_shape = layout.local_shape(size, x.coordinate)

    def wrapped(part: Part, dtype: torch.dtype) -> Planned:
        return p.wrap(p.local(torch.reshape, part, local_shape), x, layout=layout, shape=size, dtype=dtype)

    if len(schema_of(func).returns) == 1:
        return wrapped(indices, torch.int64)
    return wrapped(values, x.dtype), wrapped(indices, torch.int64)


def _best_along(local: torch.Tensor, dim: int, largest: bool, start: int) -> Found:
    """This rank's best along one dim, and its place in the whole."""
    values, indices = (torch.max if largest else torch.min)(stand_in(local, (dim,)), dim, keepdim=True)
    return values, indices + start


def _best_of_all(
    local: torch.Tensor, dims: tuple[int, ...], largest: bool, shape: tuple[int, ...], offset: tuple[int, ...]
) -> Found:
    """This rank's best element, and its place in the flattened whole."""
    local = stand_in(local, dims)
    place = (torch.argmax if largest else torch.argmin)(local)
    index = torch.zeros_like(place)
    for dim, (size, start) in enumerate(zip(shape, offset, strict=True)):
        index = index * size + start + place // math.prod(local.shape[dim + 1 :]) % local.shape[dim]
    return local.flatten().index_select(0, place.view(1)).view(()), index


def _pick(
    p: Writer,
    values: Part,
    indices: Part,
    x: Planned,
    dims: tuple[int, ...],
    largest: bool,
    shape: list[int],
) -> tuple[Part, ...]:
    """The best of all ranks' candidates; of equal ones the first in the whole."""
    axes = sharding_axes(x.global_layout, dims)
    values = p.gather(values, x, axes, shape, x.dtype)
    indices = p.gather(indices, x, axes, shape, torch.int64)
    return p.locals(2, _best_kept, values, indices, _holders(p, x, dims, axes), largest)


def _best_kept(values: torch.Tensor, indices: torch.Tensor, kept: list[int], largest: bool) -> Found:
    values, indices = values[kept], indices[kept]
    best = values.amax(0) if largest else values.amin(0)
    is_best = (values == best) | (values.isnan() & best.isnan())
    return best, indices.masked_fill(~is_best, torch.iinfo(torch.int64).max).amin(0)


def _holders(p: Writer, x: Planned, dims: tuple[int, ...], axes: tuple[int, ...]) -> list[int]:
    """Which ranks have anything along `dims`."""
    shapes = [x.global_layout.local_shape(x.shape, where) for where in p.members(x, axes)]
    return [i for i, shape in enumerate(shapes) if math.prod(shape[d] for d in dims)]


def top(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """topk over a sharded dim: the k best of each rank, gathered; the k best of those."""
    given = arguments_of(func, args, kwargs)
    x: Planned = given["self"]
    dims = as_dims(given["dim"], x.ndim) if x.ndim else ()
    if not dims or not is_ours(x, dims) or not 0 < given["k"] <= x.shape[dims[0]]:
        return p.by_lines(func, args, kwargs)
    x = p.reduced(x)
    k, (dim,), largest, is_sorted = given["k"], dims, given["largest"], given["sorted"]
    axes = sharding_axes(x.global_layout, dims)
    shape = [k if d == dim else n for d, n in enumerate(x.local_shape)]
    values, indices = p.locals(2, _own_top, x, k, dim, largest, x.interval(dim)[0])
    values = p.gather(values, x, axes, shape, x.dtype)
    indices = p.gather(indices, x, axes, shape, torch.int64)
    lengths = [min(x.interval(dim, where)[1], k) for where in p.members(x, axes)]
    values, indices = p.locals(2, _top_of, values, indices, k, dim, lengths, largest, is_sorted)
    placements = [Replicate() if a in axes else q for a, q in enumerate(x.global_layout.placements)]
    layout = Layout(x.global_layout.mesh, placements, [e for e in x.global_layout.shard_order if e[0] != dim])
    size = (*x.shape[:dim], k, *x.shape[dim + 1 :])
    return (
        p.wrap(values, x, layout=layout, shape=size),
        p.wrap(indices, x, layout=layout, shape=size, dtype=torch.int64),
    )


def _own_top(local: torch.Tensor, k: int, dim: int, largest: bool, start: int) -> Found:
    local = stand_in(local, (dim,))
    values, indices = torch.topk(local, min(k, local.shape[dim]), dim, largest)
    return _widen(values, k, dim), _widen(indices + start, k, dim)


def _top_of(
    values: torch.Tensor,
    indices: torch.Tensor,
    k: int,
    dim: int,
    lengths: list[int],
    largest: bool,
    is_sorted: bool,
) -> Found:
    values = torch.cat([v.narrow(dim, 0, n) for v, n in zip(values, lengths, strict=True)], dim)
    indices = torch.cat([i.narrow(dim, 0, n) for i, n in zip(indices, lengths, strict=True)], dim)
    values, chosen = torch.topk(values, k, dim, largest, is_sorted)
    return values, indices.gather(dim, chosen)


def _widen(tensor: torch.Tensor, size: int, dim: int) -> torch.Tensor:
    """Filled up to `size` along `dim`, so that all ranks send as much."""
    missing = size - tensor.shape[dim]
    if not missing:
        return tensor
    return torch.cat(
        [tensor, tensor.new_zeros([missing if d == dim else n for d, n in enumerate(tensor.shape)])], dim
    )


ALONG = Rule(reduce_lines, reduced_meta, program=along_dim)

RULES: dict[str, Rule] = {
    **dict.fromkeys(("max.dim", "min.dim", "argmax.default", "argmin.default"), ALONG),
    "topk.default": Rule(along_others(kinds=()), program=top),
}
