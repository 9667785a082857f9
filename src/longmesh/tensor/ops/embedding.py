"""Lookups in cut tables: results that stay pending with their mask, and gradients cut by rows.

The gradient op is not told how the table lies. The forward leaves a note on the index tensor, which autograd hands
to the backward as it was: `table layout by number of rows`. A note that is missing costs nothing but the
layout: the gradient is then laid out by the op's rule.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from longmesh.comm import comm_of
from longmesh.rules.lookup import check_range
from longmesh.rules.scatter import own_or_spare
from longmesh.spec import Layout, MaskPartial, Partial, Placement, Replicate, Shard
from longmesh.tensor.autograd import move
from longmesh.tensor.dispatch import USUAL, Handler, dispatch
from longmesh.tensor.dtensor import DTensor
from longmesh.tensor.mask_buffer import without_mask
from longmesh.tensor.ops.pieces import bind
from longmesh.tensor.ops.recut import interval
from longmesh.tensor.plain import replicate_plain

aten = torch.ops.aten


def lookup(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """embedding, index_select, gather: along a cut dim the result is pending, with a mask of its own."""
    return dispatch.run(func, args, kwargs)


def embedding(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Its backward is not given the table, so the indices remember how the last one of its size was cut."""
    table, indices = args[:2]
    if isinstance(table, DTensor):
        notes = indices.__dict__.setdefault("_table_layouts", {})
        notes[table.shape[0]] = table._layout if table._layout.cuts(0) else None
    return lookup(func, args, kwargs)


def copy_pending(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """detach, alias and clone of a pending lookup are pending, too."""
    tensor = args[0]
    if tensor._lookup is None:
        is_pending = without_mask(tensor._layout) is not tensor._layout
        return dispatch.run(func, args, kwargs) if is_pending else USUAL
    result = DTensor(
        func(tensor._local_tensor, **kwargs), tensor._mesh, tensor._layout, tensor.shape, tensor.stride()
    )
    result._lookup = tensor._lookup.share()
    return result


def embedding_backward(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of a table cut by rows each rank makes the gradient of its own rows, and sends nothing for it."""
    given = bind(func, args, kwargs)
    notes = getattr(given["indices"], "_table_layouts", {})
    table = notes.get(given["num_weights"])
    if table is None:
        return dispatch.run(func, args, kwargs)
    args, kwargs = replicate_plain(func, args, kwargs)
    given = bind(func, args, kwargs)
    grad, indices = given["grad_output"], given["indices"]
    rows = table.cuts(0)
    batch = _batch_layout(grad._layout, rows, indices.ndim, keep=not given["scale_grad_by_freq"])
    local = _own_rows(
        move(grad, batch)._local_tensor,
        move(indices, _without_columns(batch, indices.ndim))._local_tensor,
        given,
        interval(table, 0, given["num_weights"], comm_of(grad._mesh).coordinate),
    )
    layout = _table_gradient(table, batch, indices.ndim)
    shape = (given["num_weights"], grad.shape[-1])
    return DTensor(local, grad._mesh, layout, shape, (grad.shape[-1], 1))


def _batch_layout(layout: Layout, rows: tuple[int, ...], last: int, *, keep: bool) -> Layout:
    """The gradient whole on the axes that cut the rows; elsewhere cut or a pending sum, as it lies."""
    for axis, placement in enumerate(layout.placements):
        cut_batch = isinstance(placement, Shard) and placement.dim < last
        pending = placement.is_partial() and (
            isinstance(placement, MaskPartial) or not placement.is_partial("sum")
        )
        if axis in rows or pending or (cut_batch and not keep):
            layout = layout.with_placement(axis, Replicate())
    return layout


def _without_columns(layout: Layout, last: int) -> Layout:
    for axis, placement in enumerate(layout.placements):
        if placement.is_partial() or placement.is_shard(last):
            layout = layout.with_placement(axis, Replicate())
    return layout


def _table_gradient(table: Layout, batch: Layout, last: int) -> Layout:
    """Rows cut as the table's; a cut batch is a pending sum, cut columns stay."""
    placements: list[Placement] = []
    for axis, placement in enumerate(batch.placements):
        if axis in table.cuts(0):
            placements.append(Shard(0))
        elif placement.is_shard(last):
            placements.append(Shard(1))
        else:
            placements.append(Partial() if not placement.is_replicate() else Replicate())
    order = [(0, table.cuts(0))]
    if batch.cuts(last):
        order.append((1, batch.cuts(last)))
    return Layout(table.mesh, placements, order)


def _own_rows(
    grad: torch.Tensor, indices: torch.Tensor, given: dict[str, Any], own: tuple[int, int]
) -> torch.Tensor:
    """The plain op on this rank's rows, with one spare row for the indices of others."""
    start, length = own
    check_range(indices, given["num_weights"], 0)
    mine = own_or_spare(indices, start, length)
    padding = given["padding_idx"]
    padding = padding - start if start <= padding < start + length else -1
    whole = aten.embedding_dense_backward(
        grad.contiguous(), mine, length + 1, padding, given["scale_grad_by_freq"]
    )
    return whole.narrow(0, 0, length)


def renorm(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """embedding_renorm_: each rank rescales the rows of its own that were looked up."""
    table, indices, max_norm, norm_type = replicate_plain(func, args, kwargs)[0]
    layout = table._layout
    for axis, placement in enumerate(layout.placements):
        if not placement.is_shard(0):
            layout = layout.with_placement(axis, Replicate())
    whole = move(indices, Layout.replicated(layout.mesh))._local_tensor.reshape(-1)
    check_range(whole, table.shape[0], 0)
    start, length = interval(layout, 0, table.shape[0], comm_of(table._mesh).coordinate)
    moved = table if layout is table._layout else move(table, layout)
    mine = whole[(whole >= start) & (whole < start + length)] - start
    if mine.numel():
        aten.embedding_renorm_(moved._local_tensor, mine, max_norm, norm_type)
    if moved is not table:
        table._local_tensor.copy_(move(moved, table._layout)._local_tensor)
    return table


HANDLERS: dict[OpOverload, Handler] = {
    aten.embedding.default: embedding,
    aten.index_select.default: lookup,
    aten.gather.default: lookup,
    aten.embedding_dense_backward.default: embedding_backward,
    aten.embedding_renorm_.default: renorm,
    aten.detach.default: copy_pending,
    aten.alias.default: copy_pending,
    aten.clone.default: copy_pending,
}
