"""What the gradient of a lookup depends on beyond its arguments: how the table was laid out.

The gradient op is not given the table. The forward notes for the index tensor, which autograd hands to the backward as
it was, how the table of that many rows was laid out. A note that is missing costs nothing but the layout: the gradient
is then laid out by the lines of the op's rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.weak import WeakTensorKeyDictionary

from longmesh._torch import OpOverload, aten
from longmesh.rules.rule import arguments_of
from longmesh.spec import Layout
from longmesh.tensor.dtensor import DTensor

Note = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]


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
        given = arguments_of(func, args, kwargs)
        return self._layouts.get(given["indices"], {}).get(given["num_weights"])

    def find_sparse(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Layout | None:
        """Before a sparse gradient is put together: the same by its rows alone."""
        return self._sparse.get(arguments_of(func, args, kwargs)["size"][0])


_tables = TablesOfIndices()

# Called before all else; what they return, hashable, is part of the key of a plan.
NOTES: dict[OpOverload, Note] = {
    aten.embedding.default: _tables.note,
    aten.embedding_dense_backward.default: _tables.find,
    aten._sparse_coo_tensor_with_dims_and_tensors.default: _tables.find_sparse,
}
