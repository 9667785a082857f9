"""Slices, splits and their inverses: other dims may be sharded, and the sliced one by a program.

Along a sharded dim a rank keeps its part, then one exchange restores chunking.
"""

from __future__ import annotations

from typing import Any

import torch

from longmesh._torch import OpOverload, aten
from longmesh.errors import LongmeshError
from longmesh.rules.index import sizes_meta
from longmesh.rules.planned import Planned
from longmesh.rules.rule import AxisRule, OpCall, OutMeta, Rule, S, arguments_of, line
from longmesh.rules.scatter import first_meta
from longmesh.rules.steps import Interval
from longmesh.rules.view import LINEAR, PENDING, along_others, local_sizes
from longmesh.rules.writer import Writer
from longmesh.spec import Coordinate


def slice_range(size: int, start: int | None, end: int | None, step: int) -> tuple[int, int]:
    """First position and number of positions of a slice, as torch counts them."""
    first, last, _ = slice(start, end).indices(size)
    return first, max(0, -(-(last - first) // step))


def slice_meta(call: OpCall) -> tuple[OutMeta, ...]:
    tensor, dim, step = call.tensors[0], call.dim(), call["step"]
    shape, stride = list(tensor.shape), list(tensor.stride)
    shape[dim] = slice_range(shape[dim], call["start"], call["end"], step)[1]
    stride[dim] *= step
    return (OutMeta(tuple(shape), tuple(stride)),)


def slice_scatter_lines(call: OpCall) -> list[AxisRule]:
    dim = call.dim()
    lines = [line([S(d), S(d)], S(d)) for d in range(call.tensors[0].ndim) if d != dim]
    return lines + [line([p, p], p) for p in PENDING]


def sliced_part(first: int, count: int, step: int, offset: int, length: int) -> tuple[int, Interval]:
    """Of the positions first, first + step, ... those in a rank's rows: where they begin locally, and their
    interval among all `count` of them."""
    begin = min(count, max(0, -(-(offset - first) // step)))
    end = min(count, max(0, -(-(offset + length - first) // step)))
    return first + begin * step - offset, (begin, max(0, end - begin))


def slice_tensor(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % max(tensor.ndim, 1)
    if not tensor.global_layout.shard_axes(dim):
        return p.by_lines(func, args, kwargs)
    given = arguments_of(func, args, kwargs)
    step = given["step"]
    first, count = slice_range(tensor.shape[dim], given["start"], given["end"], step)
    if count == tensor.shape[dim]:
        return p.op(aten.alias.default, (tensor,), {})
    return take_slice(p, tensor, dim, first, count, step)


def take_slice(p: Writer, tensor: Planned, dim: int, first: int, count: int, step: int) -> Planned:
    """`count` positions of a sharded dim, from `first` on, every `step`-th."""
    tensor = p.linear_or_reduced(tensor)
    begin, (_, length) = sliced_part(first, count, step, *tensor.interval(dim))
    shape = list(tensor.shape)
    shape[dim] = count

    def intervals(coordinate: Coordinate) -> tuple[Interval, ...]:
        return (sliced_part(first, count, step, *tensor.interval(dim, coordinate))[1],)

    own = p.local(_own_part, tensor, dim, begin, length, step)
    return p.exchange([own], tensor, shape, dim, intervals)


def _own_part(local: torch.Tensor, dim: int, begin: int, length: int, step: int) -> torch.Tensor:
    mine = local.narrow(dim, begin if length else 0, (length - 1) * step + 1 if length else 0)
    return aten.slice.Tensor(mine, dim, 0, None, step) if step > 1 else mine


def slice_backward(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Zeros between and around the rows of a sharded gradient."""
    given = arguments_of(func, args, kwargs)
    grad, sizes, step = given["grad_output"], given["input_sizes"], given["step"]
    dim = given["dim"] % len(sizes)
    if not grad.global_layout.shard_axes(dim):
        return p.by_lines(func, args, kwargs)
    grad = p.linear_or_reduced(grad)
    first, _ = slice_range(sizes[dim], given["start"], given["end"], step)

    def intervals(coordinate: Coordinate) -> tuple[Interval, ...]:
        start, length = grad.interval(dim, coordinate)
        return ((first + start * step, (length - 1) * step + 1 if length else 0),)

    return p.exchange([p.local(_spread, grad, dim, step)], grad, sizes, dim, intervals)


def _spread(local: torch.Tensor, dim: int, step: int) -> torch.Tensor:
    if step == 1 or not local.shape[dim]:
        return local
    shape = list(local.shape)
    shape[dim] = (shape[dim] - 1) * step + 1
    wide = local.new_zeros(shape)
    aten.slice.Tensor(wide, dim, 0, None, step).copy_(local)
    return wide


def slice_scatter(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows of a sharded tensor replaced: each rank is sent those that fall into its part."""
    given = arguments_of(func, args, kwargs)
    tensor, source, step = given["self"], given["src"], given["step"]
    dim = given["dim"] % max(tensor.ndim, 1)
    size = tensor.shape[dim]
    first, count = slice_range(size, given["start"], given["end"], step)
    place = (*tensor.shape[:dim], count, *tensor.shape[dim + 1 :])
    if tuple(source.shape) != place:
        raise LongmeshError(
            f"{func}: the source is {tuple(source.shape)}, the place for it {place}; they must be equal"
        )
    if not tensor.global_layout.shard_axes(dim):
        return p.by_lines(func, args, kwargs)
    tensor = p.reduced(tensor)
    source = p.redistribute(source, tensor.global_layout)

    def want(coordinate: Coordinate) -> Interval:
        return sliced_part(first, count, step, *tensor.interval(dim, coordinate))[1]

    rows = p.exchange_into([source], source, dim, lambda c: (source.interval(dim, c),), want)
    begin = sliced_part(first, count, step, *tensor.interval(dim))[0]
    return p.wrap(p.local(_put, tensor, rows, dim, begin, step), tensor)


def _put(local: torch.Tensor, rows: torch.Tensor, dim: int, begin: int, step: int) -> torch.Tensor:
    out = local.clone()
    length = rows.shape[dim]
    if length:
        target = out.narrow(dim, begin, (length - 1) * step + 1)
        target[(slice(None),) * dim + (slice(None, None, step),)].copy_(rows)
    return out


def split(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pieces of a sharded dim, each sharded anew."""
    tensor = args[0]
    dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % max(tensor.ndim, 1)
    if not tensor.global_layout.shard_axes(dim):
        return p.by_lines(func, args, kwargs)
    given = arguments_of(func, args, kwargs)
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


SPLIT = Rule(along_others(), program=split)

RULES: dict[str, Rule] = {
    "slice.Tensor": Rule(along_others(), slice_meta, program=slice_tensor),
    "slice_backward.default": Rule(
        along_others(kinds=LINEAR), sizes_meta, local_args=local_sizes, program=slice_backward
    ),
    "slice_scatter.default": Rule(slice_scatter_lines, first_meta, program=slice_scatter),
    **{
        f"{name}{kind}": SPLIT
        for name in ("", "unsafe_")
        for kind in ("split.Tensor", "split_with_sizes.default")
    },
}
