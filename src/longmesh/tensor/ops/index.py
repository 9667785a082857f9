"""Slices and their inverses along a cut dim: a rank keeps its part, then one exchange restores chunking."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from longmesh.comm import comm_of
from longmesh.comm.intervals import Interval, exchange_intervals
from longmesh.errors import LongmeshError
from longmesh.rules.index import slice_range
from longmesh.spec import Coordinate, MaskPartial, Partial
from longmesh.tensor.autograd import move
from longmesh.tensor.dispatch import USUAL, Handler, dispatch
from longmesh.tensor.dtensor import DTensor
from longmesh.tensor.op_facts import is_view
from longmesh.tensor.ops.pieces import bind, reduced
from longmesh.tensor.ops.recut import interval, recut
from longmesh.tensor.plain import replicate_plain
from longmesh.tensor.view_origin import remember_origin

aten = torch.ops.aten


def linear_or_reduced(tensor: DTensor) -> DTensor:
    """Zeros may be put around a pending sum or average; any other pending reduction is carried out first."""
    pending = [p for p in tensor._layout.placements if isinstance(p, Partial)]
    if any(isinstance(p, MaskPartial) or p.reduce_op not in ("sum", "avg") for p in pending):
        return reduced(tensor)
    return tensor


def sliced_part(first: int, count: int, step: int, offset: int, length: int) -> tuple[int, Interval]:
    """Of the positions first, first + step, ... those in a rank's rows: where they begin locally, and their
    interval among all `count` of them."""
    begin = min(count, max(0, -(-(offset - first) // step)))
    end = min(count, max(0, -(-(offset + length - first) // step)))
    return first + begin * step - offset, (begin, max(0, end - begin))


def slice_tensor(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % max(tensor.ndim, 1)
    if not tensor._layout.cuts(dim):
        return USUAL
    given = bind(func, args, kwargs)
    step = given["step"]
    first, count = slice_range(tensor.shape[dim], given["start"], given["end"], step)
    if count == tensor.shape[dim]:
        return dispatch(aten.alias.default, tensor)
    result = take_slice(tensor, dim, first, count, step)
    remember_origin(result, func, args, kwargs)
    return result


def take_slice(tensor: DTensor, dim: int, first: int, count: int, step: int) -> DTensor:
    """`count` positions of a cut dim, from `first` on, every `step`-th. Collective."""
    tensor = linear_or_reduced(tensor)
    layout, size = tensor._layout, tensor.shape[dim]
    where = comm_of(tensor._mesh).coordinate
    begin, (_, length) = sliced_part(first, count, step, *interval(layout, dim, size, where))
    mine = tensor._local_tensor.narrow(dim, begin if length else 0, (length - 1) * step + 1 if length else 0)
    if step > 1:
        mine = aten.slice.Tensor(mine, dim, 0, None, step)
    shape = list(tensor.shape)
    shape[dim] = count

    def held(coordinate: Coordinate) -> tuple[Interval, ...]:
        return (sliced_part(first, count, step, *interval(layout, dim, size, coordinate))[1],)

    return recut([mine], tensor._mesh, layout, shape, dim, held)


def slice_backward(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Zeros between and around the rows of a cut gradient."""
    given = bind(func, args, kwargs)
    grad, sizes, step = given["grad_output"], given["input_sizes"], given["step"]
    dim = given["dim"] % len(sizes)
    if not grad._layout.cuts(dim):
        return USUAL
    grad = linear_or_reduced(grad)
    layout, count = grad._layout, grad.shape[dim]
    first, _ = slice_range(sizes[dim], given["start"], given["end"], step)

    def held(coordinate: Coordinate) -> tuple[Interval, ...]:
        start, length = interval(layout, dim, count, coordinate)
        return ((first + start * step, (length - 1) * step + 1 if length else 0),)

    spread = grad._local_tensor
    if step > 1 and spread.shape[dim]:
        shape = list(spread.shape)
        shape[dim] = (shape[dim] - 1) * step + 1
        spread = spread.new_zeros(shape)
        aten.slice.Tensor(spread, dim, 0, None, step).copy_(grad._local_tensor)
    return recut([spread], grad._mesh, layout, sizes, dim, held)


def slice_scatter(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows of a cut tensor replaced: each rank is sent those that fall into its part."""
    args, kwargs = replicate_plain(func, args, kwargs)
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
    if not tensor._layout.cuts(dim):
        return USUAL
    tensor = reduced(tensor)
    layout = tensor._layout
    source = move(source, layout)
    comm = comm_of(tensor._mesh)
    group = comm.group(tuple(sorted(layout.cuts(dim))))
    rows = exchange_intervals(
        [source._local_tensor],
        have=tuple((interval(layout, dim, count, c),) for c in group.members),
        want=tuple(
            sliced_part(first, count, step, *interval(layout, dim, size, c))[1] for c in group.members
        ),
        dim=dim,
        group=group,
    )
    begin = sliced_part(first, count, step, *interval(layout, dim, size, comm.coordinate))[0]
    out = tensor._local_tensor.clone()
    length = rows.shape[dim]
    if length:
        out.narrow(dim, begin, (length - 1) * step + 1)[
            (slice(None),) * dim + (slice(None, None, step),)
        ].copy_(rows)
    return DTensor(out, tensor._mesh, layout, tensor.shape, tensor.stride())


def split(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pieces of a cut dim, each cut anew."""
    tensor = args[0]
    dim = (args[2] if len(args) > 2 else kwargs.get("dim", 0)) % max(tensor.ndim, 1)
    if not tensor._layout.cuts(dim):
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
    pieces = [take_slice(tensor, dim, start, size, 1) for start, size in zip(starts, sizes, strict=True)]
    if is_view(func):
        remember_origin(pieces, func, args, kwargs)
    return pieces


def index_by_mask(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Boolean indices are the positions of their true elements, the same on every rank."""
    indices = args[1]
    if not any(isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices):
        return USUAL
    args, kwargs = replicate_plain(func, args, kwargs)
    tensor, indices, *rest = args
    mask = indices[0]
    if len(indices) == 1 and rest and rest[0].numel() == 1 and not (len(rest) > 1 and rest[1]):
        wide = mask.bool().reshape(*mask.shape, *[1] * (tensor.ndim - mask.ndim))
        return _fill(func, tensor, wide, rest[0].reshape(()).to(tensor.dtype))
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
    return dispatch.run(func, (tensor, found, *rest), kwargs)


def _fill(func: OpOverload, tensor: DTensor, mask: DTensor, value: DTensor) -> DTensor:
    if func._schema.is_mutable:
        return aten.masked_fill_.Tensor(tensor, mask, value)
    return aten.masked_fill.Tensor(tensor, mask, value)


HANDLERS: dict[OpOverload, Handler] = {
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
