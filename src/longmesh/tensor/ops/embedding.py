"""Lookups in sharded tables: gradients sharded by rows, and rows rescaled in place.

The gradient op is not given the table. The forward notes for the index tensor, which autograd hands to the backward as
it was, how the table of that many rows was laid out. A note that is missing costs nothing but the layout: the gradient
is then laid out by the op's rule.

A DTensor is dense, and so is the gradient of a lookup with `sparse=True`: the same values, laid out as the table is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from longmesh._torch import OpOverload, aten
from longmesh.rules.lookup import check_range
from longmesh.rules.scatter import own_or_spare
from longmesh.spec import Layout, MaskPartial, Partial, Placement, Replicate, Shard
from longmesh.tensor.dtensor import DTensor
from longmesh.tensor.make_plan import COPIES, Family
from longmesh.tensor.op_facts import bind
from longmesh.tensor.op_key import Note
from longmesh.tensor.planned import Planned
from longmesh.tensor.planner import USUAL, Planner


class TablesOfIndices:
    """How the tables that a tensor of indices looked into are laid out, by their number of rows."""

    def __init__(self) -> None:
        self._layouts: Any = WeakTensorKeyDictionary()
        # Of lookups with sparse gradients, whose indices torch copies on the way: the last table of so many rows.
        self._sparse: dict[int, Layout | None] = {}

    def note(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a lookup: remember the table's layout."""
        table, indices = args[:2]
        if isinstance(table, DTensor):
            layout = table._layout if table._layout.shard_axes(0) else None
            self._layouts[indices] = {**self._layouts.get(indices, {}), table.shape[0]: layout}
            if args[4] if len(args) > 4 else kwargs.get("sparse"):
                self._sparse[table.shape[0]] = layout

    def find(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Layout | None:
        """Before the gradient: what was remembered."""
        given = bind(func, args, kwargs)
        return self._layouts.get(given["indices"], {}).get(given["num_weights"])

    def find_sparse(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Layout | None:
        """Before a sparse gradient is put together: the same by its rows alone."""
        return self._sparse.get(bind(func, args, kwargs)["size"][0])


_tables = TablesOfIndices()


def embedding_backward(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of a table sharded by rows each rank makes the gradient of its own rows, and sends nothing for it."""
    table: Layout | None = p.note
    if table is None:
        return USUAL
    given = bind(func, args, kwargs)
    grad, indices = given["grad_output"], given["indices"]
    rows = table.shard_axes(0)
    batch = _batch_layout(grad._layout, rows, indices.ndim, keep=not given["scale_grad_by_freq"])
    start, length = table.interval(0, given["num_weights"], p.comm.coordinate)
    grad = p.redistribute(grad, batch)
    indices = p.redistribute(indices, _without_columns(batch, indices.ndim))
    options = {name: given[name] for name in ("num_weights", "padding_idx", "scale_grad_by_freq")}
    local = p.local(_own_rows, grad, indices, int(start), int(length), **options)
    layout = _table_gradient(table, batch, indices.ndim)
    return p.wrap(local, grad, layout=layout, shape=(given["num_weights"], grad.shape[-1]))


def sparse_gradient(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What torch makes a sparse gradient of, rows and their indices: the dense gradient that they stand for."""
    given = bind(func, args, kwargs)
    if (given["sparse_dim"], given["dense_dim"]) != (1, 1):
        return USUAL
    if p.note is not None and p.note.mesh is not p.comm.shape:
        p.note = None  # of another table
    rows = aten.embedding_dense_backward.default
    indices = p.op(aten.select.int, (given["indices"], 0, 0), {})
    return p.op(rows, (given["values"], indices, given["size"][0], -1, False), {})


def bag_gradient(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The gradient of a bag's table: the dense one, also where a sparse one is asked for."""
    given = bind(func, args, kwargs)
    return p.op(func, tuple({**given, "sparse": False}.values()), {}) if given["sparse"] else USUAL


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


def copy_pending(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """detach, alias and clone of a pending lookup are pending, too, and share its mask."""
    own = args[0]._tensor_layout
    return p.planned(p.local(func, args[0], **kwargs).number, own) if own.has_lookup else USUAL


def renorm(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """embedding_renorm_: each rank rescales the rows of its own that were looked up."""
    table, indices, max_norm, norm_type = args
    layout, size = table._layout, table.shape[0]
    others = [axis for axis in range(layout.mesh.ndim) if axis not in layout.shard_axes(0)]
    moved: Planned = p.redistribute(table, layout.with_replicated(others))
    start, length = moved.interval(0)

    def rescale(part: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        whole = indices.reshape(-1)
        check_range(whole, size, 0)
        mine = whole[(whole >= start) & (whole < start + length)] - start
        return aten.embedding_renorm_(part, mine, max_norm, norm_type) if mine.numel() else part

    p.local(rescale, moved, p.replicated(indices))
    if moved is not table:
        p.write(table, moved)
    return table


FAMILIES: dict[OpOverload, Family] = {
    aten.embedding_dense_backward.default: embedding_backward,
    aten.embedding_renorm_.default: renorm,
    aten._sparse_coo_tensor_with_dims_and_tensors.default: sparse_gradient,
    aten._embedding_bag_backward.default: bag_gradient,
    **dict.fromkeys(COPIES, copy_pending),
}
NOTES: dict[OpOverload, Note] = {
    aten.embedding.default: _tables.note,
    aten.embedding_dense_backward.default: _tables.find,
    aten._sparse_coo_tensor_with_dims_and_tensors.default: _tables.find_sparse,
}
