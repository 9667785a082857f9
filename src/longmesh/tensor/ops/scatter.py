"""Scattered extrema of a pending sum: its terms are added in the order of the ranks.

The gradient goes to the elements that equal the result, bit for bit, and reads the pending sum a second time. The order
in which an all_reduce adds depends on where an element lies; a reduce_scatter adds in the order of the ranks
wherever it cuts, and that is how a comparison brings a pending sum to a cut.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from longmesh.spec import Replicate, Shard
from longmesh.tensor.autograd import move
from longmesh.tensor.dispatch import Handler, dispatch
from longmesh.tensor.dtensor import DTensor
from longmesh.tensor.plain import replicate_plain
from longmesh.tensor.tree import map_tensors

aten = torch.ops.aten


def reduce_in_order(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """scatter_reduce and index_reduce on operands of which some are pending."""
    args, kwargs = replicate_plain(func, args, kwargs)
    args, kwargs = map_tensors(_added_in_order, (args, kwargs))
    return dispatch.run(func, args, kwargs)


def _added_in_order(tensor: torch.Tensor) -> DTensor:
    """The tensor cut by the axes on which it was pending; a scalar can't be cut."""
    assert isinstance(tensor, DTensor)
    layout = tensor._layout
    free = [d for d in range(tensor.ndim) if not layout.cuts(d)]
    for axis in layout.partial_axes:
        dim = max(free, key=lambda d: tensor.shape[d], default=None)
        layout = layout.with_placement(axis, Replicate() if dim is None else Shard(dim))
    return tensor if layout is tensor._layout else move(tensor, layout)


HANDLERS: dict[OpOverload, Handler] = dict.fromkeys(
    (aten.scatter_reduce.two, aten.index_reduce.default), reduce_in_order
)
