"""cat, pads, flips, rolls and repeats along a cut dim: pieces at new places, then one exchange per dim."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._ops import OpOverload

from longmesh.comm import comm_of
from longmesh.comm.intervals import Interval
from longmesh.spec import Coordinate
from longmesh.tensor.autograd import move
from longmesh.tensor.dispatch import USUAL, Handler, dispatch
from longmesh.tensor.dtensor import DTensor
from longmesh.tensor.ops.index import linear_or_reduced
from longmesh.tensor.ops.pieces import bind, reduced
from longmesh.tensor.ops.recut import interval, recut
from longmesh.tensor.plain import replicate_plain

aten = torch.ops.aten


def cat(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given: list[Any] = args[0]
    tensors = [t for t in given if t.shape != (0,)]
    if not tensors:
        return USUAL
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % max(tensors[0].ndim, 1)
    if not any(isinstance(t, DTensor) and t._layout.cuts(dim) for t in tensors):
        return USUAL
    everything, _ = replicate_plain(func, (list(given),), {})
    tensors = [t for t in everything[0] if t.shape != (0,)]
    cut = [t for t in tensors if t._layout.cuts(dim)]
    if any(_others(t, dim) != _others(tensors[0], dim) for t in tensors):
        return USUAL
    layout = reduced(max(cut, key=torch.Tensor.numel))._layout
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in given))
    pieces = [move(t, layout)._local_tensor.to(dtype) for t in tensors]
    sizes = [t.shape[dim] for t in tensors]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    shape = list(tensors[0].shape)
    shape[dim] = sum(sizes)

    def held(coordinate: Coordinate) -> tuple[Interval, ...]:
        found = (interval(layout, dim, size, coordinate) for size in sizes)
        return tuple((start + offset, length) for start, (offset, length) in zip(starts, found, strict=True))

    return recut(pieces, tensors[0]._mesh, layout, shape, dim, held)


def _others(tensor: torch.Tensor, dim: int) -> tuple[int, ...]:
    return (*tensor.shape[:dim], *tensor.shape[dim + 1 :], tensor.ndim)


def constant_pad(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = bind(func, args, kwargs)
    tensor, pad, value = given["self"], list(given["pad"]), given["value"]
    widths = {tensor.ndim - 1 - i: (pad[2 * i], pad[2 * i + 1]) for i in range(len(pad) // 2)}
    cut = [d for d, width in widths.items() if tensor._layout.cuts(d) and width != (0, 0)]
    if not cut or any(tensor.shape[d] + sum(widths[d]) < 0 for d in widths):
        return USUAL
    tensor = linear_or_reduced(tensor) if value == 0 else reduced(tensor)
    for d in cut:
        tensor = _pad_cut_dim(tensor, d, *widths[d], value)
        pad[2 * (tensor.ndim - 1 - d)] = pad[2 * (tensor.ndim - 1 - d) + 1] = 0
    return dispatch.run(func, (tensor, pad, value), {}) if any(pad) else tensor


def _pad_cut_dim(tensor: DTensor, dim: int, left: int, right: int, value: Any) -> DTensor:
    layout, size = tensor._layout, tensor.shape[dim]
    shape = list(tensor.shape)
    shape[dim] = size + left + right

    def held(coordinate: Coordinate) -> tuple[Interval, ...]:
        start, length = interval(layout, dim, size, coordinate)
        return ((start + left, length),)

    return recut([tensor._local_tensor], tensor._mesh, layout, shape, dim, held, fill=value)


def flip(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, dims = args
    dims = [d % max(tensor.ndim, 1) for d in dims]
    cut = [d for d in dims if tensor._layout.cuts(d)]
    if not cut:
        return USUAL
    tensor = linear_or_reduced(tensor)
    layout, shape = tensor._layout, tensor.shape
    local = tensor._local_tensor.flip(dims)
    for d in cut:

        def held(coordinate: Coordinate, d: int = d) -> tuple[Interval, ...]:
            start, length = interval(layout, d, shape[d], coordinate)
            return ((shape[d] - start - length, length),)

        local = recut([local], tensor._mesh, layout, shape, d, held)._local_tensor
    return DTensor(local, tensor._mesh, layout, shape, tensor.stride())


def roll(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = bind(func, args, kwargs)
    tensor, shifts, dims = given["self"], given["shifts"], given["dims"]
    if not dims:  # rolled as if flat
        return tensor.reshape(-1).roll(shifts, 0).reshape(tensor.shape) if tensor.ndim else tensor.clone()
    dims = [d % max(tensor.ndim, 1) for d in dims]
    if not any(tensor._layout.cuts(d) for d in dims):
        return USUAL
    for shift, dim in zip(shifts, dims, strict=True):
        if tensor._layout.cuts(dim) and tensor.shape[dim]:
            tensor = _roll_cut_dim(linear_or_reduced(tensor), dim, shift % tensor.shape[dim])
        else:
            tensor = dispatch.run(func, (tensor, [shift], [dim]), {})
    return tensor


def _roll_cut_dim(tensor: DTensor, dim: int, shift: int) -> DTensor:
    """A rank's rows move on by `shift`; those that pass the end begin anew."""
    layout, size = tensor._layout, tensor.shape[dim]

    def held(coordinate: Coordinate) -> tuple[Interval, ...]:
        start, length = interval(layout, dim, size, coordinate)
        begin = (start + shift) % size
        before_end = min(length, size - begin)
        return ((begin, before_end), (0, length - before_end))

    first, second = held(comm_of(tensor._mesh).coordinate)
    pieces = tensor._local_tensor.split([first[1], second[1]], dim)
    return recut(pieces, tensor._mesh, layout, tensor.shape, dim, held)


def repeat(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Along a cut dim a repetition is a cat of the tensor with itself."""
    tensor, repeats = args[0], list(args[1])
    new = len(repeats) - tensor.ndim
    cut = [d for d in range(tensor.ndim) if tensor._layout.cuts(d) and repeats[d + new] > 1]
    if new < 0 or not cut:
        return USUAL
    for d in cut:
        tensor = dispatch(aten.cat.default, [tensor] * repeats[d + new], d)
        repeats[d + new] = 1
    return dispatch.run(func, (tensor, repeats), {})


HANDLERS: dict[OpOverload, Handler] = {
    aten.cat.default: cat,
    aten.constant_pad_nd.default: constant_pad,
    aten.flip.default: flip,
    aten.roll.default: roll,
    aten.repeat.default: repeat,
}
