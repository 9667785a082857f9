"""Embedding backward and bags: gradients of tables.

The gradient of a table is a sum over the indices: a sharded batch gives a pending sum, sharded columns stay sharded.
Which rows a rank keeps can't be read from the arguments: the forward has noted how the table is laid out
(`tensor/table_notes.py`), and the gradient of one that is sharded by rows is sharded as it is.

A DTensor is dense, and so is the gradient of a lookup with `sparse=True`: the same values, laid out as the table is.
"""

from __future__ import annotations

from typing import Any

import torch

from longmesh._torch import OpOverload, aten
from longmesh.rules.lookup import check_range
from longmesh.rules.planned import Planned
from longmesh.rules.rule import (
    AxisRule,
    OpCall,
    OutMeta,
    P,
    R,
    Rule,
    S,
    arguments_of,
    contiguous,
    line,
    no_lines,
)
from longmesh.rules.scatter import own_or_spare
from longmesh.rules.view import LINEAR
from longmesh.rules.writer import Writer
from longmesh.spec import Layout, MaskPartial, Partial, Placement, Replicate, Shard

MAX_MODE = 2


def backward_lines(call: OpCall) -> list[AxisRule]:
    grad, indices = call.tensors
    lines = [line([S(grad.ndim - 1), R], S(1))]
    lines += [line([p, R], p) for p in LINEAR]
    if not call["scale_grad_by_freq"]:  # frequencies count the whole batch
        lines += [line([S(d), S(d)], P) for d in range(indices.ndim)]
    return lines


def backward_meta(call: OpCall) -> tuple[OutMeta, ...]:
    grad = call.tensors[0]
    return (contiguous((call["num_weights"], grad.shape[-1])),)


def bag_lines(call: OpCall) -> list[AxisRule]:
    """Outputs: bags, offset2bag, bag_size, max_indices. Columns are independent; sums and means are linear."""
    rest = [R] * (len(call.tensors) - 1)
    if call["mode"] == MAX_MODE:
        return [line([S(1), *rest], (S(1), R, R, S(1)))]
    return [line([S(1), *rest], (S(1), R, R, R)), *(line([p, *rest], (p, R, R, R)) for p in LINEAR)]


def bag_backward_lines(call: OpCall) -> list[AxisRule]:
    """The gradient comes first; of the rest only `maximum_indices` has columns."""
    columns = call["maximum_indices"].index
    if call["mode"] == MAX_MODE:
        return [line([S(1) if m.index in (0, columns) else R for m in call.tensors], S(1))]
    rest = [R] * (len(call.tensors) - 1)
    return [line([S(1), *rest], S(1)), *(line([p, *rest], p) for p in LINEAR)]


# -- gradients sharded by rows, and rows rescaled in place ------------------------------------------


def embedding_backward(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of a table sharded by rows each rank makes the gradient of its own rows, and sends nothing for it."""
    table: Layout | None = p.note
    if table is None:
        return p.by_lines(func, args, kwargs)
    given = arguments_of(func, args, kwargs)
    grad, indices = given["grad_output"], given["indices"]
    rows = table.shard_axes(0)
    batch = _batch_layout(grad.global_layout, rows, indices.ndim, keep=not given["scale_grad_by_freq"])
    start, length = table.interval(0, given["num_weights"], p.coordinate)
    grad = p.redistribute(grad, batch)
    indices = p.redistribute(indices, _without_columns(batch, indices.ndim))
    options = {name: given[name] for name in ("num_weights", "padding_idx", "scale_grad_by_freq")}
    local = p.local(_own_rows, grad, indices, int(start), int(length), **options)
    layout = _table_gradient(table, batch, indices.ndim)
    return p.wrap(local, grad, layout=layout, shape=(given["num_weights"], grad.shape[-1]))


def sparse_gradient(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What torch makes a sparse gradient of, rows and their indices: the dense gradient that they stand for."""
    given = arguments_of(func, args, kwargs)
    if (given["sparse_dim"], given["dense_dim"]) != (1, 1):
        return p.by_lines(func, args, kwargs)
    if p.note is not None and p.note.mesh is not p.mesh:
        p.note = None  # of another table
    rows = aten.embedding_dense_backward.default
    indices = p.op(aten.select.int, (given["indices"], 0, 0), {})
    return p.op(rows, (given["values"], indices, given["size"][0], -1, False), {})


def bag_gradient(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The gradient of a bag's table: the dense one, also where a sparse one is asked for."""
    given = arguments_of(func, args, kwargs)
    if not given["sparse"]:
        return p.by_lines(func, args, kwargs)
    return p.op(func, tuple({**given, "sparse": False}.values()), {})


def _batch_layout(layout: Layout, rows: tuple[int, ...], last: int, *, keep: bool) -> Layout:
    """The gradient whole on the axes that shard the rows; elsewhere sharded or a pending sum, as it is."""
    moved = list(rows)
    for axis, placement in enumerate(layout.placements):
        in_batch = isinstance(placement, Shard) and placement.dim < last
        is_sum = placement.is_partial("sum") and not isinstance(placement, MaskPartial)
        if (placement.is_partial() and not is_sum) or (in_batch and not keep):
            moved.append(axis)
    return layout.with_replicated(moved)


def _without_columns(layout: Layout, last: int) -> Layout:
    return layout.with_replicated([*layout.partial_axes, *layout.shard_axes(last)])


def _table_gradient(table: Layout, batch: Layout, last: int) -> Layout:
    """Rows sharded as the table's; a sharded batch is a pending sum, sharded columns stay."""
    placements: list[Placement] = []
    for axis, placement in enumerate(batch.placements):
        if axis in table.shard_axes(0):
            placements.append(Shard(0))
        elif placement.is_shard(last):
            placements.append(Shard(1))
        else:
            placements.append(Partial() if not placement.is_replicate() else Replicate())
    order = [(0, table.shard_axes(0))]
    if batch.shard_axes(last):
        order.append((1, batch.shard_axes(last)))
    return Layout(table.mesh, placements, order)


def _own_rows(
    grad: torch.Tensor,
    indices: torch.Tensor,
    start: int,
    length: int,
    *,
    num_weights: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> torch.Tensor:
    """The plain op on this rank's rows, with one spare row for the indices of others."""
    check_range(indices, num_weights, 0)
    mine = own_or_spare(indices, start, length)
    padding = padding_idx - start if start <= padding_idx < start + length else -1
    whole = aten.embedding_dense_backward(grad.contiguous(), mine, length + 1, padding, scale_grad_by_freq)
    return whole.narrow(0, 0, length)


def renorm(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """embedding_renorm_: each rank rescales the rows of its own that were looked up."""
    table, indices, max_norm, norm_type = args
    layout, size = table.global_layout, table.shape[0]
    others = [axis for axis in range(layout.mesh.ndim) if axis not in layout.shard_axes(0)]
    moved: Planned = p.redistribute(table, layout.with_replicated(others))
    p.local(_rescale, moved, p.replicated(indices), size, moved.interval(0), max_norm, norm_type)
    if moved is not table:
        p.write(table, moved)
    return table


def _rescale(
    part: torch.Tensor,
    indices: torch.Tensor,
    size: int,
    interval: tuple[int, int],
    max_norm: float,
    norm_type: float,
) -> torch.Tensor:
    whole, (start, length) = indices.reshape(-1), interval
    check_range(whole, size, 0)
    mine = whole[(whole >= start) & (whole < start + length)] - start
    return aten.embedding_renorm_(part, mine, max_norm, norm_type) if mine.numel() else part


RULES: dict[str, Rule] = {
    "embedding_dense_backward.default": Rule(backward_lines, backward_meta, program=embedding_backward),
    **dict.fromkeys(("_embedding_bag.default", "_embedding_bag_forward_only.default"), Rule(bag_lines)),
    "_embedding_bag_backward.default": Rule(bag_backward_lines, backward_meta, program=bag_gradient),
    "_embedding_bag_dense_backward.default": Rule(bag_backward_lines, backward_meta),
    "_embedding_bag_per_sample_weights_backward.default": Rule(no_lines),
    "embedding_renorm.default": Rule(no_lines),
    "embedding_renorm_.default": Rule(program=renorm),
    "_sparse_coo_tensor_with_dims_and_tensors.default": Rule(program=sparse_gradient),
}
