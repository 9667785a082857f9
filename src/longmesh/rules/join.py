"""cat, stack, pads, flips, rolls and repeats: any dim that they don't touch may be sharded.

Along a sharded dim pieces go to new places, then one exchange per dim restores chunking.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from longmesh._torch import OpOverload
from longmesh.rules.pieces import without_pending
from longmesh.rules.planned import Planned
from longmesh.rules.rule import AxisRule, Meta, OpCall, OutMeta, R, Rule, S, arguments_of, contiguous, line
from longmesh.rules.steps import Interval
from longmesh.rules.view import LINEAR, PENDING, kept, other_dims, pending_lines
from longmesh.rules.writer import Writer
from longmesh.spec import Coordinate


def is_filler(meta: Meta) -> bool:
    """cat skips tensors of shape (0,), whatever the others' shapes."""
    return meta.shape == (0,)


def cat_lines(call: OpCall) -> list[AxisRule]:
    out = call.outputs[0].shape
    dim = call["dim"] % max(len(out), 1)
    lines = [
        line([R if is_filler(m) and len(out) > 1 else S(d) for m in call.tensors], S(d))
        for d in range(len(out))
        if d != dim
    ]
    return lines + pending_lines(call)


def cat_meta(call: OpCall) -> tuple[OutMeta, ...]:
    full = [m for m in call.tensors if not is_filler(m)] or [call.tensors[0]]
    shape = list(full[0].shape)
    dim: int = call["dim"] % max(len(shape), 1)
    shape[dim] = sum(m.shape[dim] for m in full)
    if any(m.ndim != len(shape) or _others(m.shape, dim) != _others(full[0].shape, dim) for m in full):
        raise RuntimeError(
            f"cat along dim {dim} of tensors of shapes {', '.join(str(m.shape) for m in call.tensors)}: "
            "they must agree in every other dim"
        )
    return (contiguous(shape),)


def _others(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return shape[:dim] + shape[dim + 1 :]


def stack_lines(call: OpCall) -> list[AxisRule]:
    ndim = call.tensors[0].ndim
    dim = call["dim"] % (ndim + 1)
    lines = [line([S(d)] * len(call.tensors), S(d + (d >= dim))) for d in range(ndim)]
    return lines + [line([p] * len(call.tensors), p) for p in PENDING]


def flip_lines(call: OpCall) -> list[AxisRule]:
    return kept(call, other_dims(call, [d % max(call.tensors[0].ndim, 1) for d in call["dims"]]))


def roll_lines(call: OpCall) -> list[AxisRule]:
    """Without dims the tensor is rolled as if it were flat."""
    dims = [d % max(call.tensors[0].ndim, 1) for d in call["dims"]]
    return kept(call, other_dims(call, dims) if dims else [])


def pad_lines(call: OpCall) -> list[AxisRule]:
    """Padding with a number other than 0 would be added once per rank."""
    ndim, pad = call.tensors[0].ndim, call["pad"]
    padded = [ndim - 1 - i // 2 for i, width in enumerate(pad) if width]
    return kept(
        call, other_dims(call, padded), PENDING if not padded else LINEAR if call["value"] == 0 else ()
    )


def repeat_lines(call: OpCall) -> list[AxisRule]:
    repeats = call["repeats"]
    new = len(repeats) - call.tensors[0].ndim
    return kept(call, [(d, d + new) for d in range(call.tensors[0].ndim) if repeats[d + new] == 1])


# -- along a sharded dim ---------------------------------------------------------------------------


def cat(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given: list[Planned] = args[0]
    tensors = [t for t in given if t.shape != (0,)]
    if not tensors:
        return p.by_lines(func, args, kwargs)
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % max(tensors[0].ndim, 1)
    sharded = [t for t in tensors if t.global_layout.shard_axes(dim)]
    if not sharded or len({(t.ndim, _others(tuple(t.shape), dim)) for t in tensors}) > 1:
        return p.by_lines(func, args, kwargs)
    largest = max(sharded, key=torch.Tensor.numel)
    layout = without_pending(largest.global_layout)
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in given))
    pieces = [p.local(torch.Tensor.to, p.redistribute(t, layout), dtype) for t in tensors]
    sizes: list[int] = [t.shape[dim] for t in tensors]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    shape: list[int] = list(tensors[0].shape)
    shape[dim] = sum(sizes)

    def intervals(coordinate: Coordinate) -> tuple[Interval, ...]:
        found = (layout.interval(dim, size, coordinate) for size in sizes)
        return tuple((start + int(a), int(n)) for start, (a, n) in zip(starts, found, strict=True))

    return p.exchange(pieces, largest, shape, dim, intervals, layout=layout, dtype=dtype)


def constant_pad(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = arguments_of(func, args, kwargs)
    tensor, pad, value = given["self"], list(given["pad"]), given["value"]
    widths = {tensor.ndim - 1 - i: (pad[2 * i], pad[2 * i + 1]) for i in range(len(pad) // 2)}
    sharded = [d for d, width in widths.items() if tensor.global_layout.shard_axes(d) and width != (0, 0)]
    if not sharded or any(tensor.shape[d] + sum(widths[d]) < 0 for d in widths):
        return p.by_lines(func, args, kwargs)
    tensor = p.linear_or_reduced(tensor) if value == 0 else p.reduced(tensor)
    for d in sharded:
        tensor = _pad_sharded_dim(p, tensor, d, *widths[d], value)
        pad[2 * (tensor.ndim - 1 - d)] = pad[2 * (tensor.ndim - 1 - d) + 1] = 0
    return p.by_lines(func, (tensor, pad, value), {}) if any(pad) else tensor


def _pad_sharded_dim(p: Writer, tensor: Planned, dim: int, left: int, right: int, value: Any) -> Planned:
    shape = list(tensor.shape)
    shape[dim] += left + right

    def intervals(coordinate: Coordinate) -> tuple[Interval, ...]:
        start, length = tensor.interval(dim, coordinate)
        return ((start + left, length),)

    return p.exchange([tensor], tensor, shape, dim, intervals, fill=value)


def flip(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, dims = args
    dims = [d % max(tensor.ndim, 1) for d in dims]
    sharded = [d for d in dims if tensor.global_layout.shard_axes(d)]
    if not sharded:
        return p.by_lines(func, args, kwargs)
    tensor = p.linear_or_reduced(tensor)
    result = p.wrap(p.local(torch.flip, tensor, dims), tensor)
    for d in sharded:

        def intervals(coordinate: Coordinate, d: int = d) -> tuple[Interval, ...]:
            start, length = tensor.interval(d, coordinate)
            return ((tensor.shape[d] - start - length, length),)

        result = p.exchange([result], tensor, tensor.shape, d, intervals)
    return result


def roll(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = arguments_of(func, args, kwargs)
    tensor, shifts, dims = given["self"], given["shifts"], given["dims"]
    if not dims:  # rolled as if flat
        return tensor.reshape(-1).roll(shifts, 0).reshape(tensor.shape) if tensor.ndim else tensor.clone()
    dims = [d % max(tensor.ndim, 1) for d in dims]
    if not any(tensor.global_layout.shard_axes(d) for d in dims):
        return p.by_lines(func, args, kwargs)
    shift: int
    dim: int
    for shift, dim in zip(shifts, dims, strict=True):
        if tensor.global_layout.shard_axes(dim) and tensor.shape[dim]:
            tensor = _roll_sharded_dim(p, p.linear_or_reduced(tensor), dim, shift % tensor.shape[dim])
        else:
            tensor = p.by_lines(func, (tensor, [shift], [dim]), {})
    return tensor


def _roll_sharded_dim(p: Writer, tensor: Planned, dim: int, shift: int) -> Planned:
    """A rank's rows move on by `shift`; those that pass the end begin anew."""
    size = tensor.shape[dim]

    def intervals(coordinate: Coordinate) -> tuple[Interval, ...]:
        start, length = tensor.interval(dim, coordinate)
        begin = (start + shift) % size
        before_end = min(length, size - begin)
        return ((begin, before_end), (0, length - before_end))

    first, second = intervals(tensor.coordinate)
    pieces = p.locals(2, torch.split, tensor, [first[1], second[1]], dim)
    return p.exchange(pieces, tensor, tensor.shape, dim, intervals)


def repeat(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Along a sharded dim a repetition is a cat of the tensor with itself."""
    tensor, repeats = args[0], list(args[1])
    new = len(repeats) - tensor.ndim
    sharded = [
        d
        for d in range(tensor.ndim)
        if new >= 0 and tensor.global_layout.shard_axes(d) and repeats[d + new] > 1
    ]
    if not sharded:
        return p.by_lines(func, args, kwargs)
    for d in sharded:
        tensor = torch.cat([tensor] * repeats[d + new], d)
        repeats[d + new] = 1
    return p.by_lines(func, (tensor, repeats), {})


RULES: dict[str, Rule] = {
    "cat.default": Rule(cat_lines, cat_meta, program=cat),
    "stack.default": Rule(stack_lines),
    "constant_pad_nd.default": Rule(pad_lines, program=constant_pad),
    "flip.default": Rule(flip_lines, program=flip),
    "roll.default": Rule(roll_lines, program=roll),
    "repeat.default": Rule(repeat_lines, program=repeat),
}
