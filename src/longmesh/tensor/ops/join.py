"""cat, pads, flips, rolls and repeats along a sharded dim: pieces at new places, then one exchange per dim."""

from __future__ import annotations

import functools
from typing import Any

import torch

from longmesh._torch import OpOverload, aten
from longmesh.comm.intervals import Interval
from longmesh.spec import Coordinate
from longmesh.tensor.autograd import gradient_layout
from longmesh.tensor.make_plan import Family
from longmesh.tensor.op_facts import bind
from longmesh.tensor.planned import Planned
from longmesh.tensor.planner import USUAL, Planner


def cat(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given: list[Planned] = args[0]
    tensors = [t for t in given if t.shape != (0,)]
    if not tensors:
        return USUAL
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % max(tensors[0].ndim, 1)
    sharded = [t for t in tensors if t._layout.shard_axes(dim)]
    if not sharded or any(_others(t, dim) != _others(tensors[0], dim) for t in tensors):
        return USUAL
    largest = max(sharded, key=torch.Tensor.numel)
    layout = gradient_layout(largest._layout)
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in given))
    pieces = [p.local(torch.Tensor.to, p.redistribute(t, layout), dtype) for t in tensors]
    sizes = [t.shape[dim] for t in tensors]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    shape = list(tensors[0].shape)
    shape[dim] = sum(sizes)

    def intervals(coordinate: Coordinate) -> tuple[Interval, ...]:
        found = (layout.interval(dim, size, coordinate) for size in sizes)
        return tuple((start + int(a), int(n)) for start, (a, n) in zip(starts, found, strict=True))

    return p.exchange(pieces, largest, shape, dim, intervals, layout=layout, dtype=dtype)


def _others(tensor: torch.Tensor, dim: int) -> tuple[int, ...]:
    return (*tensor.shape[:dim], *tensor.shape[dim + 1 :], tensor.ndim)


def constant_pad(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = bind(func, args, kwargs)
    tensor, pad, value = given["self"], list(given["pad"]), given["value"]
    widths = {tensor.ndim - 1 - i: (pad[2 * i], pad[2 * i + 1]) for i in range(len(pad) // 2)}
    sharded = [d for d, width in widths.items() if tensor._layout.shard_axes(d) and width != (0, 0)]
    if not sharded or any(tensor.shape[d] + sum(widths[d]) < 0 for d in widths):
        return USUAL
    tensor = p.linear_or_reduced(tensor) if value == 0 else p.reduced(tensor)
    for d in sharded:
        tensor = _pad_sharded_dim(p, tensor, d, *widths[d], value)
        pad[2 * (tensor.ndim - 1 - d)] = pad[2 * (tensor.ndim - 1 - d) + 1] = 0
    return p.by_rule(func, (tensor, pad, value), {}) if any(pad) else tensor


def _pad_sharded_dim(p: Planner, tensor: Planned, dim: int, left: int, right: int, value: Any) -> Planned:
    shape = list(tensor.shape)
    shape[dim] += left + right

    def intervals(coordinate: Coordinate) -> tuple[Interval, ...]:
        start, length = tensor.interval(dim, coordinate)
        return ((start + left, length),)

    return p.exchange([tensor], tensor, shape, dim, intervals, fill=value)


def flip(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, dims = args
    dims = [d % max(tensor.ndim, 1) for d in dims]
    sharded = [d for d in dims if tensor._layout.shard_axes(d)]
    if not sharded:
        return USUAL
    tensor = p.linear_or_reduced(tensor)
    result = p.wrap(p.local(torch.flip, tensor, dims), tensor)
    for d in sharded:

        def intervals(coordinate: Coordinate, d: int = d) -> tuple[Interval, ...]:
            start, length = tensor.interval(d, coordinate)
            return ((tensor.shape[d] - start - length, length),)

        result = p.exchange([result], tensor, tensor.shape, d, intervals)
    return result


def roll(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = bind(func, args, kwargs)
    tensor, shifts, dims = given["self"], given["shifts"], given["dims"]
    if not dims:  # rolled as if flat
        return tensor.reshape(-1).roll(shifts, 0).reshape(tensor.shape) if tensor.ndim else tensor.clone()
    dims = [d % max(tensor.ndim, 1) for d in dims]
    if not any(tensor._layout.shard_axes(d) for d in dims):
        return USUAL
    for shift, dim in zip(shifts, dims, strict=True):
        if tensor._layout.shard_axes(dim) and tensor.shape[dim]:
            tensor = _roll_sharded_dim(p, p.linear_or_reduced(tensor), dim, shift % tensor.shape[dim])
        else:
            tensor = p.by_rule(func, (tensor, [shift], [dim]), {})
    return tensor


def _roll_sharded_dim(p: Planner, tensor: Planned, dim: int, shift: int) -> Planned:
    """A rank's rows move on by `shift`; those that pass the end begin anew."""
    size = tensor.shape[dim]

    def intervals(coordinate: Coordinate) -> tuple[Interval, ...]:
        start, length = tensor.interval(dim, coordinate)
        begin = (start + shift) % size
        before_end = min(length, size - begin)
        return ((begin, before_end), (0, length - before_end))

    first, second = intervals(tensor._tensor_layout.comm.coordinate)
    pieces = p.locals(2, torch.split, tensor, [first[1], second[1]], dim)
    return p.exchange(pieces, tensor, tensor.shape, dim, intervals)


def repeat(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Along a sharded dim a repetition is a cat of the tensor with itself."""
    tensor, repeats = args[0], list(args[1])
    new = len(repeats) - tensor.ndim
    sharded = [
        d for d in range(tensor.ndim) if new >= 0 and tensor._layout.shard_axes(d) and repeats[d + new] > 1
    ]
    if not sharded:
        return USUAL
    for d in sharded:
        tensor = torch.cat([tensor] * repeats[d + new], d)
        repeats[d + new] = 1
    return p.by_rule(func, (tensor, repeats), {})


FAMILIES: dict[OpOverload, Family] = {
    aten.cat.default: cat,
    aten.constant_pad_nd.default: constant_pad,
    aten.flip.default: flip,
    aten.roll.default: roll,
    aten.repeat.default: repeat,
}
