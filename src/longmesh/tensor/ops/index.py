"""Slices and their inverses along a sharded dim: a rank keeps its part, then one exchange restores chunking."""

from __future__ import annotations

from typing import Any

import torch

from longmesh._torch import OpOverload, aten, schema_of
from longmesh.comm.intervals import Interval
from longmesh.errors import LongmeshError
from longmesh.rules.index import slice_range
from longmesh.spec import Coordinate
from longmesh.tensor.make_plan import Family
from longmesh.tensor.op_facts import bind
from longmesh.tensor.planned import Planned
from longmesh.tensor.planner import USUAL, Planner


def sliced_part(first: int, count: int, step: int, offset: int, length: int) -> tuple[int, Interval]:
    """Of the positions first, first + step, ... those in a rank's rows: where they begin locally, and their
    interval among all `count` of them."""
    begin = min(count, max(0, -(-(offset - first) // step)))
    end = min(count, max(0, -(-(offset + length - first) // step)))
    return first + begin * step - offset, (begin, max(0, end - begin))


def slice_tensor(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % max(tensor.ndim, 1)
    if not tensor._layout.shard_axes(dim):
        return USUAL
    given = bind(func, args, kwargs)
    step = given["step"]
    first, count = slice_range(tensor.shape[dim], given["start"], given["end"], step)
    if count == tensor.shape[dim]:
        return p.op(aten.alias.default, (tensor,), {})
    return take_slice(p, tensor, dim, first, count, step)


def take_slice(p: Planner, tensor: Planned, dim: int, first: int, count: int, step: int) -> Planned:
    """`count` positions of a sharded dim, from `first` on, every `step`-th."""
    tensor = p.linear_or_reduced(tensor)
    begin, (_, length) = sliced_part(first, count, step, *tensor.interval(dim))

    def own(local: torch.Tensor) -> torch.Tensor:
        mine = local.narrow(dim, begin if length else 0, (length - 1) * step + 1 if length else 0)
        return aten.slice.Tensor(mine, dim, 0, None, step) if step > 1 else mine

    shape = list(tensor.shape)
    shape[dim] = count

    def intervals(coordinate: Coordinate) -> tuple[Interval, ...]:
        return (sliced_part(first, count, step, *tensor.interval(dim, coordinate))[1],)

    return p.exchange([p.local(own, tensor)], tensor, shape, dim, intervals)


def slice_backward(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Zeros between and around the rows of a sharded gradient."""
    given = bind(func, args, kwargs)
    grad, sizes, step = given["grad_output"], given["input_sizes"], given["step"]
    dim = given["dim"] % len(sizes)
    if not grad._layout.shard_axes(dim):
        return USUAL
    grad = p.linear_or_reduced(grad)
    first, _ = slice_range(sizes[dim], given["start"], given["end"], step)

    def intervals(coordinate: Coordinate) -> tuple[Interval, ...]:
        start, length = grad.interval(dim, coordinate)
        return ((first + start * step, (length - 1) * step + 1 if length else 0),)

    def spread(local: torch.Tensor) -> torch.Tensor:
        if step == 1 or not local.shape[dim]:
            return local
        shape = list(local.shape)
        shape[dim] = (shape[dim] - 1) * step + 1
        wide = local.new_zeros(shape)
        aten.slice.Tensor(wide, dim, 0, None, step).copy_(local)
        return wide

    return p.exchange([p.local(spread, grad)], grad, sizes, dim, intervals)


def slice_scatter(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows of a sharded tensor replaced: each rank is sent those that fall into its part."""
    given = bind(func, args, kwargs)
    tensor, source, step = given["self"], given["src"], given["step"]
    dim = given["dim"] % max(tensor.ndim, 1)
    size = tensor.shape[dim]
    first, count = slice_range(size, given["start"], given["end"], step)
    place = (*tensor.shape[:dim], count, *tensor.shape[dim + 1 :])
    if tuple(source.shape) != place:
        raise LongmeshError(
            f"{func}: the source is {tuple(source.shape)}, the place for it {place}; they must be equal"
        )
    if not tensor._layout.shard_axes(dim):
        return USUAL
    tensor = p.reduced(tensor)
    source = p.redistribute(source, tensor._layout)

    def want(coordinate: Coordinate) -> Interval:
        return sliced_part(first, count, step, *tensor.interval(dim, coordinate))[1]

    rows = p.exchange_into([source], source, dim, lambda c: (source.interval(dim, c),), want)
    begin = sliced_part(first, count, step, *tensor.interval(dim))[0]

    def put(local: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        out = local.clone()
        length = rows.shape[dim]
        if length:
            target = out.narrow(dim, begin, (length - 1) * step + 1)
            target[(slice(None),) * dim + (slice(None, None, step),)].copy_(rows)
        return out

    return p.wrap(p.local(put, tensor, rows), tensor)


def split(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pieces of a sharded dim, each sharded anew."""
    tensor = args[0]
    dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % max(tensor.ndim, 1)
    if not tensor._layout.shard_axes(dim):
        return USUAL
    given = bind(func, args, kwargs)
    sizes = given.get("split_sizes")
    total = tensor.shape[dim]
    if sizes is None:
        step = given["split_size"]
        sizes = [min(step, total - i) for i in range(0, total, max(step, 1))] or [0]
    if sum(sizes) != total:
        raise RuntimeError(f"split sizes {list(sizes)} must add up to {total}, the size of dim {dim}")
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    tensor = p.linear_or_reduced(tensor)
    return [take_slice(p, tensor, dim, start, size, 1) for start, size in zip(starts, sizes, strict=True)]


def index_by_mask(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Boolean indices are the positions of their true elements, the same on every rank: data decides how many."""
    tensor, indices, *rest = args
    if not any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        return USUAL
    mask = indices[0]
    if len(indices) == 1 and rest and rest[0].numel() == 1 and not (len(rest) > 1 and rest[1]):
        wide = mask.bool().reshape(*mask.shape, *[1] * (tensor.ndim - mask.ndim))
        value = rest[0].reshape(()).to(tensor.dtype)
        fill = aten.masked_fill_.Tensor if schema_of(func).is_mutable else aten.masked_fill.Tensor
        return p.op(fill, (tensor, wide, value), {})
    return p.one_by_one(func, _by_positions)


def _by_positions(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, indices, *rest = args
    found: list[Any] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            found.append(index)
            continue
        if tuple(index.shape) != tuple(tensor.shape[len(found) : len(found) + index.ndim]):
            raise IndexError(
                f"The shape of the mask {list(index.shape)} at index {len(found)} does not match the shape of the "
                f"indexed tensor {list(tensor.shape)}"
            )
        found.extend(aten.nonzero.default(index).unbind(1))
    return func(tensor, found, *rest, **kwargs)


FAMILIES: dict[OpOverload, Family] = {
    aten.slice.Tensor: slice_tensor,
    aten.slice_backward.default: slice_backward,
    aten.slice_scatter.default: slice_scatter,
    **dict.fromkeys(
        (
            aten.split.Tensor,
            aten.split_with_sizes.default,
            aten.unsafe_split.Tensor,
            aten.unsafe_split_with_sizes.default,
        ),
        split,
    ),
    **dict.fromkeys(
        (
            aten.index.Tensor,
            aten._unsafe_index.Tensor,
            aten.index_put.default,
            aten.index_put_.default,
            aten._unsafe_index_put.default,
            aten._index_put_impl_.default,
        ),
        index_by_mask,
    ),
}
