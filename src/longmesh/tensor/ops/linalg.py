"""Linear algebra that looks at values: error codes, and a least-squares fit whose outputs depend on data."""

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


def check_errors(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Raise for a matrix that could not be factored: on every rank or on none, whoever holds it."""
    info = args[0]
    return func(move(info, Layout.replicated(info._layout.mesh))._local_tensor, *args[1:], **kwargs)


def whole(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An op whose output shapes depend on data and drivers: run on the gathered inputs by every rank."""
    mesh = first_mesh(args, kwargs)
    layout = Layout.replicated(mesh)

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        return move(tensor, layout)._local_tensor if isinstance(tensor, DTensor) else tensor

    local_args, local_kwargs = map_tensors(gather, (args, kwargs))
    result = func(*local_args, **local_kwargs)
    return map_tensors(lambda t: DTensor(t, mesh, layout, t.shape, t.stride()), result)


HANDLERS: dict[OpOverload, Handler] = {
    aten._linalg_check_errors.default: check_errors,
    aten.linalg_lstsq.default: whole,
}
