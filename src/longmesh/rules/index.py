"""Reading by position: slice, select, advanced indexing, triangles, pads.

Dims that are not indexed stay sharded. A sharded dim that is indexed gives a pending sum: each rank answers for the
positions it holds and adds zeros for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from longmesh._torch import OpOverload, aten, schema_of
from longmesh.errors import LongmeshError
from longmesh.rules.lookup import check_range, own_part
from longmesh.rules.pointwise import broadcast, shard_of
from longmesh.rules.rule import (
    AxisRule,
    Fixed,
    LocalView,
    Meta,
    OpCall,
    OutMeta,
    P,
    R,
    Rule,
    S,
    contiguous,
    line,
    no_lines,
)
from longmesh.rules.strided import same_dims
from longmesh.rules.view import LINEAR, PENDING, kept, local_sizes, other_dims
from longmesh.rules.writer import Writer

# -- slice and select ----------------------------------------------------------------------------------


def sizes_meta(call: OpCall) -> tuple[OutMeta, ...]:
    return (contiguous(call["input_sizes"]),)


def select_lines(call: OpCall) -> list[AxisRule]:
    dim = call.dim()
    pairs = [(d, d - (d > dim)) for d, _ in other_dims(call, [dim])]
    return [*kept(call, pairs), line([S(dim)], P)]  # its owner adds it, the others zeros


def select_meta(call: OpCall) -> tuple[OutMeta, ...]:
    tensor, dim = call.tensors[0], call.dim()
    shape, stride = list(tensor.shape), list(tensor.stride)
    index = call["index"]
    if not -shape[dim] <= index < shape[dim]:
        raise IndexError(
            f"select(): index {index} out of range for dim {dim} of a tensor of shape {tensor.shape}"
        )
    del shape[dim], stride[dim]
    return (OutMeta(tuple(shape), tuple(stride)),)


def _select_locally(call: OpCall, view: LocalView) -> Callable[..., Any] | None:
    dim = call.dim()
    size, offset, length = call.tensors[0].shape[dim], view.input_offsets[0][dim], view.input_shapes[0][dim]
    if length == size:
        return None
    place = call["index"] % size - offset
    return Fixed(_select, (dim, place, view.output_shapes[0]))


def _select(dim: int, place: int, shape: tuple[int, ...], /, local: torch.Tensor, *_: int) -> torch.Tensor:
    return local.select(dim, place) if 0 <= place < local.shape[dim] else local.new_zeros(shape)


def select_backward_lines(call: OpCall) -> list[AxisRule]:
    dim = call["dim"] % len(call.outputs[0].shape)
    return kept(call, [(d, d + (d >= dim)) for d in range(call.tensors[0].ndim)], LINEAR)


# -- advanced indexing ---------------------------------------------------------------------------------


class Indexing:
    """Where the dims of x[i, :, j] come from: `dims` are indexed, `batch` is the shape of the indices together,
    which takes its place at `start` among the `rest`."""

    def __init__(self, indices: Sequence[Meta | None], ndim: int) -> None:
        self.dims = [d for d, m in enumerate(indices) if m is not None]
        shapes = [m.shape for m in indices if m is not None]
        try:
            self.batch = broadcast(shapes)
        except LongmeshError as error:
            text = f"shape mismatch: indices of shapes {', '.join(map(str, shapes))} don't broadcast"
            raise IndexError(text) from error
        self.rest = [d for d in range(ndim) if d not in self.dims]
        together = self.dims == list(range(self.dims[0], self.dims[-1] + 1)) if self.dims else True
        self.start = self.dims[0] if together and self.dims else 0

    def output_dim(self, dim: int) -> int:
        """Where a dim that is not indexed ends up."""
        place = self.rest.index(dim)
        return place if place < self.start else place + len(self.batch)

    def shape(self, sizes: Sequence[int]) -> tuple[int, ...]:
        rest = [sizes[d] for d in self.rest]
        return (*rest[: self.start], *self.batch, *rest[self.start :])


def index_lines(call: OpCall) -> list[AxisRule]:
    tensor, *metas = call.tensors
    where = Indexing(call["indices"], tensor.ndim)
    whole = [R] * len(metas)
    lines = [line([S(d), *whole], S(where.output_dim(d))) for d in where.rest]
    for k, size in enumerate(where.batch):
        if size != 1:
            lines.append(line([R, *(shard_of(m, k, len(where.batch)) for m in metas)], S(where.start + k)))
    lines += [line([S(d), *whole], P) for d in where.dims]
    return lines + [line([p, *whole], p) for p in PENDING]


def index_meta(call: OpCall) -> tuple[OutMeta, ...]:
    tensor = call.tensors[0]
    return (contiguous(Indexing(call["indices"], tensor.ndim).shape(tensor.shape)),)


def _index_locally(call: OpCall, view: LocalView) -> Callable[..., Any] | None:
    shape, offsets, lengths = call.tensors[0].shape, view.input_offsets[0], view.input_shapes[0]
    where = Indexing(call["indices"], len(shape))
    sharded = [d for d in where.dims if lengths[d] != shape[d]]
    if not sharded:
        return None
    pieces = tuple((d, shape[d], offsets[d], lengths[d]) for d in sharded)
    return Fixed(_index, (pieces, len(where.rest) - where.start, view.output_shapes[0]))


def _index(
    pieces: tuple[tuple[int, int, int, int], ...],
    trailing: int,
    shape: tuple[int, ...],
    /,
    local: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
) -> torch.Tensor:
    """Of the indices along sharded dims (`pieces`: the dim, its size, where the rank's part begins and how long it is)
    those of others read 0."""
    mine, foreign = list(indices), None
    for d, size, offset, length in pieces:
        given = indices[d]
        assert given is not None
        check_range(given, size, d, negative=True)
        mine[d], mask = own_part(torch.where(given < 0, given + size, given), offset, length)
        foreign = mask if foreign is None else foreign | mask
    assert foreign is not None
    if any(length == 0 for *_, length in pieces):
        return local.new_zeros(shape)
    found = torch.ops.aten.index.Tensor(local, mine)
    return found.masked_fill(foreign.reshape(*foreign.shape, *[1] * trailing), 0)


def index_by_mask(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Boolean indices are the positions of their true elements, the same on every rank: data decides how many."""
    tensor, indices, *rest = args
    if not any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        return p.by_lines(func, args, kwargs)
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


# -- triangles and pads --------------------------------------------------------------------------------


def triangle_args(call: OpCall, view: LocalView) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A rank's rows and columns start elsewhere: so does its diagonal."""
    rows, columns = view.input_offsets[0][-2:]
    return (call.args[0], call["diagonal"] + rows - columns), {}


def edge_pad_lines(call: OpCall) -> list[AxisRule]:
    """reflection_pad and replication_pad repeat elements of the last dims; the others stay sharded."""
    last = len(call["padding"]) // 2
    num = len(call.tensors)
    lines = [line([S(d)] * num, S(d)) for d in range(call.tensors[0].ndim - last)]
    return lines + [line([p, *[R] * (num - 1)], p) for p in (PENDING if num == 1 else LINEAR)]


def _edge_pad_locally(call: OpCall, view: LocalView) -> Callable[..., Any] | None:
    """torch refuses to pad nothing."""
    shape = view.output_shapes[0]
    return Fixed(_zeros, (shape,)) if 0 in shape else None


def _zeros(shape: tuple[int, ...], /, local: torch.Tensor, *_: Any) -> torch.Tensor:
    return local.new_zeros(shape)


INDEX = Rule(index_lines, index_meta, local_op=_index_locally, program=index_by_mask)
EDGE_PAD = Rule(edge_pad_lines, local_op=_edge_pad_locally)
_EDGE_PADS = [f"{kind}_pad{n}d" for kind in ("reflection", "replication") for n in (1, 2, 3)]

RULES: dict[str, Rule] = {
    "select.int": Rule(select_lines, select_meta, local_op=_select_locally),
    "select_backward.default": Rule(select_backward_lines, sizes_meta, local_args=local_sizes),
    **dict.fromkeys(("index.Tensor", "_unsafe_index.Tensor"), INDEX),
    **dict.fromkeys(("tril.default", "triu.default"), Rule(same_dims, local_args=triangle_args)),
    **dict.fromkeys((f"{name}.default" for name in _EDGE_PADS), EDGE_PAD),
    **dict.fromkeys((f"{name}_backward.default" for name in _EDGE_PADS), EDGE_PAD),
    "put.default": Rule(no_lines),
}  # fmt: skip
