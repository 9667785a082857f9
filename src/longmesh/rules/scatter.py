"""Writing by position: scatter, index_add, index_put and the like.

Along a sharded dim each rank writes what falls into its own part. Writes for other ranks go to one slot that is
added behind the part and dropped afterwards, so an op needs no masked form and an empty part is nothing
special.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from longmesh._torch import OpOverload
from longmesh.rules.index import Indexing, index_by_mask
from longmesh.rules.lookup import check_range
from longmesh.rules.pieces import without_pending
from longmesh.rules.planned import Planned
from longmesh.rules.pointwise import broadcast, shard_of
from longmesh.rules.rule import (
    AxisRule,
    Fixed,
    LocalView,
    OpCall,
    OutMeta,
    P,
    Program,
    R,
    Rule,
    S,
    contiguous,
    like,
    line,
    refuse_shapes,
)
from longmesh.rules.strided import diagonal_pairs
from longmesh.rules.tree import all_tensors, map_tensors
from longmesh.rules.view import LINEAR, PENDING
from longmesh.rules.writer import Writer


def with_spare_slot(local: torch.Tensor, dim: int) -> torch.Tensor:
    shape = list(local.shape)
    shape[dim] = 1
    return torch.cat([local, local.new_zeros(shape)], dim)


def own_or_spare(index: torch.Tensor, offset: int, length: int) -> torch.Tensor:
    """Positions in this rank's part; those of other ranks are the spare slot behind it."""
    return torch.where((index < offset) | (index >= offset + length), length, index - offset)


def first_meta(call: OpCall) -> tuple[OutMeta, ...]:
    """Shaped as the tensor written to, dense."""
    tensor = call.tensors[0]
    dense = contiguous(tensor.shape)
    return (like(tensor) if tensor.stride == dense.stride else dense,)


def index_meta(call: OpCall) -> tuple[OutMeta, ...]:
    """index_add and the like: a source has the tensor's sizes but for the dim that is indexed."""
    tensor, index, *source = call.tensors
    if source and source[0].ndim == tensor.ndim > 0:
        shape = list(tensor.shape)
        shape[call.dim()] = index.shape[0] if index.ndim else 1
        if source[0].shape != tuple(shape):
            refuse_shapes(call, f"the source must be of shape {tuple(shape)}")
    return first_meta(call)


def index_put_meta(call: OpCall) -> tuple[OutMeta, ...]:
    tensor, values = call.tensors[0], call.tensors[-1]
    if not any(meta.dtype is torch.bool for meta in call.tensors[1:-1]):
        place = Indexing(call["indices"], tensor.ndim).shape(tensor.shape)
        if broadcast([values.shape, place]) != place:
            refuse_shapes(call, f"the values must broadcast to what is indexed, {place}")
    return first_meta(call)


def select_scatter_meta(call: OpCall) -> tuple[OutMeta, ...]:
    tensor, source = call.tensors
    dim = call.dim()
    if source.shape != tensor.shape[:dim] + tensor.shape[dim + 1 :]:
        refuse_shapes(call, "the source must have the tensor's sizes without the dim that is selected")
    return first_meta(call)


def _scatter_locally(call: OpCall, view: LocalView) -> Callable[..., Any] | None:
    if call.tensors[0].ndim == 0:
        return None
    dim, func = call.dim(), call.func
    size, offset, length = call.tensors[0].shape[dim], view.input_offsets[0][dim], view.input_shapes[0][dim]
    if length == size:
        return None
    return Fixed(_scatter, (func, dim, size, offset, length))


def _scatter(
    func: OpOverload,
    dim: int,
    size: int,
    offset: int,
    length: int,
    /,
    local: torch.Tensor,
    _: int,
    index: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    check_range(index, size, dim)
    target = with_spare_slot(local, dim)
    result = func(target, dim, own_or_spare(index, offset, length), *args, **kwargs)
    return result.narrow(dim, 0, length).contiguous()


def scatter_lines(*, adds: bool) -> Callable[[OpCall], list[AxisRule]]:
    """scatter: index (and source) have the tensor's dims; `adds` where the written values are added."""

    def lines_of(call: OpCall) -> list[AxisRule]:
        tensor, index, *source = call.tensors
        if tensor.ndim == 0 or index.ndim == 0:
            return []
        dim = call.dim()
        others = [R] * len(source)
        lines = [
            line([S(d)] * len(call.tensors), S(d))
            for d in range(tensor.ndim)
            if d != dim and all(m.shape[d] == tensor.shape[d] for m in (index, *source))
        ]
        lines.append(line([S(dim), R, *others], S(dim)))
        if source:
            lines += [line([p, R, p], p) for p in LINEAR]
        if source and adds and source[0].shape[dim] == index.shape[dim]:
            lines.append(line([P, S(dim), S(dim)], P))
        return lines

    return lines_of


def scatter_reduce_lines(call: OpCall) -> list[AxisRule]:
    """Neither linear nor monotone in general: sharded dims only."""
    return [x for x in scatter_lines(adds=False)(call) if not any(p.is_partial() for p in x.inputs)]


def index_lines(*, adds: bool, linear: bool = True) -> Callable[[OpCall], list[AxisRule]]:
    """index_add, index_copy, index_fill: a 1-d index along one dim, and a source of the tensor's dims or none."""

    def lines_of(call: OpCall) -> list[AxisRule]:
        tensor, index, *source = call.tensors
        if tensor.ndim == 0:
            return []
        dim = call.dim()
        has_source = bool(source) and source[0].ndim == tensor.ndim
        lines = [
            line([S(d), R, *(S(d) if has_source else R for _ in source)], S(d))
            for d in range(tensor.ndim)
            if d != dim
        ]
        lines.append(line([S(dim), R, *(R for _ in source)], S(dim)))
        if has_source and linear:
            lines += [line([p, R, p], p) for p in LINEAR]
        if has_source and adds and index.ndim:
            lines.append(line([P, S(0), S(dim)], P))
        return lines

    return lines_of


def index_put_lines(call: OpCall) -> list[AxisRule]:
    """Indices are numbers: masks come as the positions of their true elements."""
    tensor, *metas = call.tensors
    indices, values = metas[:-1], metas[-1]
    if any(meta.dtype is torch.bool for meta in indices):
        return []
    where = Indexing(call["indices"], tensor.ndim)
    ndim = len(where.batch) + len(where.rest)
    whole = [R] * len(indices)
    lines = [
        line([S(d), *whole, shard_of(values, where.output_dim(d), ndim)], S(d))
        for d in where.rest
        if tensor.shape[d] != 1 or values.ndim + where.output_dim(d) < ndim
    ]
    lines += [line([S(d), *whole, R], S(d)) for d in where.dims]
    lines += [line([p, *whole, p], p) for p in LINEAR]
    if call["accumulate"]:
        for k, size in enumerate(where.batch):
            if size != 1:
                sharded = [shard_of(m, k, len(where.batch)) for m in indices]
                lines.append(line([P, *sharded, shard_of(values, where.start + k, ndim)], P))
    return lines


def _index_put_locally(call: OpCall, view: LocalView) -> Callable[..., Any] | None:
    shape, offsets, lengths = call.tensors[0].shape, view.input_offsets[0], view.input_shapes[0]
    sharded = [d for d in Indexing(call["indices"], len(shape)).dims if lengths[d] != shape[d]]
    if not sharded:
        return None
    return Fixed(_put, (tuple((d, shape[d], offsets[d], lengths[d]) for d in sharded),))


def _put(
    pieces: tuple[tuple[int, int, int, int], ...],
    /,
    local: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    values: torch.Tensor,
    accumulate: bool = False,
    *_: Any,
) -> torch.Tensor:
    mine, target = list(indices), local
    for d, size, offset, length in pieces:
        given = indices[d]
        assert given is not None
        check_range(given, size, d, negative=True)
        mine[d] = own_or_spare(torch.where(given < 0, given + size, given), offset, length)
        target = with_spare_slot(target, d)
    result = torch.ops.aten.index_put.default(target, mine, values, accumulate)
    for d, _size, _offset, length in pieces:
        result = result.narrow(d, 0, length)
    return result.contiguous()


# -- the inverse of views ------------------------------------------------------------------------------


def select_scatter_lines(call: OpCall) -> list[AxisRule]:
    dim = call.dim()
    lines = [line([S(d), S(d - (d > dim))], S(d)) for d in range(call.tensors[0].ndim) if d != dim]
    return [*lines, line([S(dim), R], S(dim)), *(line([p, p], p) for p in PENDING)]


def _select_scatter_locally(call: OpCall, view: LocalView) -> Callable[..., Any] | None:
    dim = call.dim()
    size, offset, length = call.tensors[0].shape[dim], view.input_offsets[0][dim], view.input_shapes[0][dim]
    if length == size:
        return None
    place = call["index"] % size - offset
    return Fixed(_put_row, (dim, place))


def _put_row(dim: int, place: int, /, local: torch.Tensor, source: torch.Tensor, *_: int) -> torch.Tensor:
    return local.select_scatter(source, dim, place) if 0 <= place < local.shape[dim] else local.clone()


def diagonal_scatter_lines(call: OpCall) -> list[AxisRule]:
    pairs = diagonal_pairs(call, call.tensors[0].ndim)
    return [line([S(d), S(o)], S(d)) for d, o in pairs] + [line([p, p], p) for p in PENDING]


def _along(
    lines: Callable[[OpCall], list[AxisRule]],
    meta: Callable[[OpCall], tuple[OutMeta, ...]] = first_meta,
    program: Program | None = None,
) -> Rule:
    return Rule(lines, meta, local_op=_scatter_locally, program=program)


def reduce_once(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """scatter_reduce and index_reduce: a pending sum is reduced once, and remembered for the gradient.

    That goes to the elements that equal the result, bit for bit, and reads the operands a second time. Two reductions
    of one pending sum may add in different orders.
    """
    if not any(t.global_layout.partial_axes for t in all_tensors((args, kwargs)) if isinstance(t, Planned)):
        return p.by_lines(func, args, kwargs)
    return p.by_lines(func, *map_tensors(lambda t: _reduced_for_good(p, t), (args, kwargs)))


def _reduced_for_good(p: Writer, x: Planned) -> Planned:
    return p.redistribute(x, without_pending(x.global_layout), remembers=True)


INDEX_PUT = Rule(index_put_lines, index_put_meta, local_op=_index_put_locally, program=index_by_mask)

RULES: dict[str, Rule] = {
    **dict.fromkeys(("scatter.src", "scatter.value"), _along(scatter_lines(adds=False))),
    "scatter_add.default": _along(scatter_lines(adds=True)),
    **dict.fromkeys(("scatter.reduce", "scatter.value_reduce"), _along(scatter_reduce_lines)),
    "scatter_reduce.two": _along(scatter_reduce_lines, program=reduce_once),
    "index_add.default": _along(index_lines(adds=True), index_meta),
    "index_copy.default": _along(index_lines(adds=False), index_meta),
    **dict.fromkeys(
        ("index_fill.int_Scalar", "index_fill.int_Tensor"),
        _along(index_lines(adds=False, linear=False), index_meta),
    ),
    "index_reduce.default": _along(index_lines(adds=False, linear=False), index_meta, reduce_once),
    **dict.fromkeys(("index_put.default", "_unsafe_index_put.default", "_index_put_impl.default"), INDEX_PUT),
    **dict.fromkeys(("index_put_.default", "_index_put_impl_.default"), INDEX_PUT),
    "select_scatter.default": Rule(select_scatter_lines, select_scatter_meta, local_op=_select_scatter_locally),
    "diagonal_scatter.default": Rule(diagonal_scatter_lines, first_meta),
}  # fmt: skip
