"""Ops whose result's shape depends on values: inputs are gathered, every rank computes the same, replicated result.

So that nobody's shape differs: a shape decided by one rank's part would make the next collective hang.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from longmesh.spec import Layout
from longmesh.tensor.autograd import move
from longmesh.tensor.dispatch import Handler
from longmesh.tensor.dtensor import DTensor
from longmesh.tensor.plain import first_mesh
from longmesh.tensor.tree import map_tensors

aten = torch.ops.aten


def on_whole_tensors(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gather every DTensor, run the op, and take its result as replicated. Plain operands are equal everywhere."""
    mesh = first_mesh(args, kwargs)
    whole = Layout.replicated(mesh)

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        return move(tensor, whole)._local_tensor if isinstance(tensor, DTensor) else tensor

    local_args, local_kwargs = map_tensors(gather, (args, kwargs))
    result = func(*local_args, **local_kwargs)
    return map_tensors(lambda t: DTensor(t, mesh, whole, t.shape, t.stride()), result)


HANDLERS: dict[OpOverload, Handler] = dict.fromkeys(
    (
        aten.nonzero.default,
        aten.nonzero_static.default,
        aten.masked_select.default,
        aten.masked_scatter.default,
        aten.masked_scatter_backward.default,
        aten._unique.default,
        aten._unique2.default,
        aten.unique_dim.default,
        aten.unique_consecutive.default,
        aten.unique_dim_consecutive.default,
        aten.repeat_interleave.Tensor,
        aten.bincount.default,
    ),
    on_whole_tensors,
)
