"""Linear algebra that looks at values: error codes, and a least-squares fit whose outputs depend on data."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from longmesh.spec import Layout
from longmesh.tensor.autograd import move
from longmesh.tensor.dispatch import Handler
from longmesh.tensor.plain import on_whole_tensors

aten = torch.ops.aten


def check_errors(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Raise for a matrix that could not be factored: on every rank or on none, whoever holds it."""
    info = args[0]
    return func(move(info, Layout.replicated(info._layout.mesh))._local_tensor, *args[1:], **kwargs)


HANDLERS: dict[OpOverload, Handler] = {
    aten._linalg_check_errors.default: check_errors,
    aten.linalg_lstsq.default: on_whole_tensors,  # shapes of its results depend on data and driver
}
