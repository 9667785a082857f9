"""The state that nn.RNN, LSTM, GRU and their cells start from where none is given.

torch makes plain zeros of the whole batch, which have no layout. So a module whose weights are DTensors gets a hook
that gives it DTensors of zeros, with the batch sharded as the input's is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from longmesh.errors import LongmeshError
from longmesh.spec import Placement, Replicate, Shard
from longmesh.tensor.dtensor import DTensor
from longmesh.tensor.factory import zeros

_MARK = "has_initial_state_hook"


def watch_recurrent(module: nn.Module, name: str, parameter: Any) -> None:
    """A hook of torch, called as `module` gets a parameter."""
    is_recurrent = isinstance(module, (nn.RNNBase, nn.RNNCellBase))
    if is_recurrent and isinstance(parameter, DTensor) and _MARK not in module.__dict__:
        module.__dict__[_MARK] = True
        module.register_forward_pre_hook(give_initial_state, with_kwargs=True)


def give_initial_state(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Before a forward: add the state that was left out. Every rank of the input's mesh."""
    names = ("input", "hx")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    x = given.get("input")
    if isinstance(x, PackedSequence):
        raise LongmeshError(
            f"{type(module).__name__} with DTensor weights takes no PackedSequence: it has no dim for the batch, "
            "which could be sharded; pass the padded batch, and mask the padding"
        )
    if not isinstance(x, DTensor) or given.get("hx") is not None:
        return None
    given["hx"] = _cell_state(module, x) if isinstance(module, nn.RNNCellBase) else _layer_state(module, x)
    return (), given


def _cell_state(module: Any, x: DTensor) -> Any:
    hidden = _zeros(x, (*x.shape[:-1], module.hidden_size), 0 if x.ndim > 1 else None, 0)
    return (hidden, torch.zeros_like(hidden)) if isinstance(module, nn.LSTMCell) else hidden


def _layer_state(module: Any, x: DTensor) -> Any:
    layers = module.num_layers * (2 if module.bidirectional else 1)
    batch = None if x.ndim < 3 else 0 if module.batch_first else 1
    sizes = (layers,) if batch is None else (layers, x.shape[batch])
    hidden = _zeros(x, (*sizes, module.proj_size or module.hidden_size), batch, 1)
    if not isinstance(module, nn.LSTM):
        return hidden
    return hidden, _zeros(x, (*sizes, module.hidden_size), batch, 1)


def _zeros(x: DTensor, shape: tuple[int, ...], batch: int | None, dim: int) -> DTensor:
    """Zeros of which `dim` is the batch, dim `batch` of the input."""
    axes = () if batch is None else x._layout.shard_axes(batch)
    placements: list[Placement] = [
        Shard(dim) if a in axes else Replicate() for a in range(x.device_mesh.ndim)
    ]
    order = [(dim, axes)] if axes else None
    return zeros(shape, dtype=x.dtype, device_mesh=x.device_mesh, placements=placements, shard_order=order)
