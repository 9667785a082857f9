"""Reductions that say where: argmax, argmin, max and min along a dim, topk.

Over a cut dim every rank sends its best and the global index of it; each picks among them, the lowest
index where values tie, as torch does. A NaN beats every number, as in torch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch._ops import OpOverload

from longmesh.comm import comm_of
from longmesh.spec import Layout, Replicate
from longmesh.tensor.dispatch import USUAL, Handler
from longmesh.tensor.dtensor import DTensor
from longmesh.tensor.meta import contiguous_stride
from longmesh.tensor.ops.pieces import (
    as_dims,
    bind,
    cutting_axes,
    gather_members,
    holders,
    reduced,
    reduced_layout,
    reduced_shape,
    stand_in,
)

aten = torch.ops.aten


def is_ours(x: DTensor, dims: tuple[int, ...]) -> bool:
    """Whether a dim is cut that has elements and can be ordered; else the op runs by its rule."""
    return x.numel() > 0 and bool(cutting_axes(x._layout, dims)) and not x.is_complex()


def along_dim(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """max.dim, min.dim, argmax and argmin with a dim or without."""
    given = bind(func, args, kwargs)
    x: DTensor = given["self"]
    dims = as_dims(given["dim"], x.ndim)
    if not is_ours(x, dims):
        return USUAL
    x = reduced(x)
    keepdim, largest = given["keepdim"], "max" in func._schema.name
    values, indices = (_best_of_all if given["dim"] is None else _best_along)(x, dims, largest)
    values, indices = _pick(values, indices, x, dims, largest)
    layout = reduced_layout(x._layout, dims, keepdim, Replicate())
    shape = reduced_shape(x.shape, dims, keepdim)
    local_shape = layout.local_shape(shape, comm_of(x._mesh).coordinate)

    def wrapped(local: torch.Tensor) -> DTensor:
        return DTensor(local.reshape(local_shape), x._mesh, layout, shape, contiguous_stride(shape))

    if len(func._schema.returns) == 1:
        return wrapped(indices)
    return wrapped(values), wrapped(indices)


def _best_along(x: DTensor, dims: tuple[int, ...], largest: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's best along one dim, and its place in the whole."""
    (dim,) = dims
    local = stand_in(x._local_tensor, dims)
    values, indices = (torch.max if largest else torch.min)(local, dim, keepdim=True)
    start, _ = x._layout.interval(dim, x.shape[dim], comm_of(x._mesh).coordinate)
    return values, indices + int(start)


def _best_of_all(x: DTensor, dims: tuple[int, ...], largest: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's best element, and its place in the flattened whole."""
    local = stand_in(x._local_tensor, dims)
    place = int((torch.argmax if largest else torch.argmin)(local))
    offset = x._layout.local_offset(x.shape, comm_of(x._mesh).coordinate)
    index = 0
    for dim, (size, start) in enumerate(zip(x.shape, offset, strict=True)):
        index = index * size + start + place // math.prod(local.shape[dim + 1 :]) % local.shape[dim]
    return local.flatten()[place], torch.tensor(index, device=local.device)


def _pick(
    values: torch.Tensor, indices: torch.Tensor, x: DTensor, dims: tuple[int, ...], largest: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best of all ranks' candidates; of equal ones the first in the whole."""
    axes = cutting_axes(x._layout, dims)
    values, members = gather_members(values, x, axes)
    indices, _ = gather_members(indices, x, axes)
    kept = holders(x, dims, members)
    values, indices = values[kept], indices[kept]
    best = values.amax(0) if largest else values.amin(0)
    is_best = (values == best) | (values.isnan() & best.isnan())
    return best, indices.masked_fill(~is_best, torch.iinfo(torch.int64).max).amin(0)


def top(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """topk over a cut dim: the k best of each rank, gathered; the k best of those."""
    given = bind(func, args, kwargs)
    x: DTensor = given["self"]
    dims = as_dims(given["dim"], x.ndim) if x.ndim else ()
    if not dims or not is_ours(x, dims) or not 0 < given["k"] <= x.shape[dims[0]]:
        return USUAL
    x = reduced(x)
    k, (dim,), largest = given["k"], dims, given["largest"]
    axes = cutting_axes(x._layout, dims)
    local = stand_in(x._local_tensor, dims)
    values, indices = torch.topk(local, min(k, local.shape[dim]), dim, largest)
    start, _ = x._layout.interval(dim, x.shape[dim], comm_of(x._mesh).coordinate)
    values, members = gather_members(_widen(values, k, dim), x, axes)
    indices, _ = gather_members(_widen(indices + int(start), k, dim), x, axes)
    lengths = [int(x._layout.interval(dim, x.shape[dim], where)[1]) for where in members]
    values = torch.cat([v.narrow(dim, 0, min(n, k)) for v, n in zip(values, lengths, strict=True)], dim)
    indices = torch.cat([i.narrow(dim, 0, min(n, k)) for i, n in zip(indices, lengths, strict=True)], dim)
    values, chosen = torch.topk(values, k, dim, largest, given["sorted"])
    placements = list(x._layout.placements)
    for axis in axes:
        placements[axis] = Replicate()
    layout = Layout(x._layout.mesh, placements, [e for e in x._layout.shard_order if e[0] != dim])
    shape = (*x.shape[:dim], k, *x.shape[dim + 1 :])
    stride = contiguous_stride(shape)
    return tuple(DTensor(t, x._mesh, layout, shape, stride) for t in (values, indices.gather(dim, chosen)))


def _widen(tensor: torch.Tensor, size: int, dim: int) -> torch.Tensor:
    """Filled up to `size` along `dim`, so that all ranks send as much."""
    missing = size - tensor.shape[dim]
    if not missing:
        return tensor
    return torch.cat(
        [tensor, tensor.new_zeros([missing if d == dim else n for d, n in enumerate(tensor.shape)])], dim
    )


HANDLERS: dict[OpOverload, Handler] = {
    **dict.fromkeys((aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default), along_dim),
    aten.topk.default: top,
}
