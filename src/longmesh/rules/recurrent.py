"""The one op that torch runs an LSTM layer as on CPUs, in float32 and bfloat16. Rows of the batch are independent.

    input (time, batch S, features), weights whole, states (batch S, hidden) -> outputs and states sharded alike
    gradients of the weights are pending sums

What the forward keeps for the backward is a block of memory of the rank's own, of a size that is the rank's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from longmesh._torch import OpOverload
from longmesh.rules.planned import Planned
from longmesh.rules.rule import Fixed, Rule, arguments_of
from longmesh.rules.writer import Writer
from longmesh.spec import Layout, Partial, Placement, Replicate, Shard

_BATCH = 1  # of the input and the output; of a state it is the first
_WEIGHTS = 4


def lstm_layer(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = arguments_of(func, args, kwargs)
    x = given["input"]
    rows, states, _ = _layouts(x)
    moved = _redistributed(p, given, rows, states)
    output, hidden, cell, workspace = p.locals(4, Fixed(_unless_empty, (func, _no_rows)), **moved)
    shape = (*x.shape[:-1], given["hidden_size"])
    return (
        p.wrap(output, x, layout=rows, shape=shape),
        p.wrap(hidden, given["hx_"], layout=states),
        p.wrap(cell, given["cx_"], layout=states),
        p.whole(workspace),
    )


def lstm_layer_backward(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = arguments_of(func, args, kwargs)
    x = given["input"]
    rows, states, pending = _layouts(x)
    moved = _redistributed(p, given, rows, states)
    parts = p.locals(3 + _WEIGHTS, Fixed(_unless_empty, (func, _no_gradients)), **moved)
    weights = [given[f"weight{number + 1}"] for number in range(_WEIGHTS)]
    return (
        p.wrap(parts[0], x, layout=rows),
        *(p.wrap(part, w, layout=pending) for part, w in zip(parts[1:], weights, strict=False)),
        p.wrap(parts[-2], given["hx_"], layout=states),
        p.wrap(parts[-1], given["cx_tmp"], layout=states),
    )


def _layouts(x: Planned) -> tuple[Layout, Layout, Layout]:
    """Of what has the input's dims, of states, and of the gradients of weights."""
    axes = x.global_layout.shard_axes(_BATCH)

    def make(on_axes: Placement, dim: int | None) -> Layout:
        mesh = x.global_layout.mesh
        placements = [on_axes if axis in axes else Replicate() for axis in range(mesh.ndim)]
        return Layout(mesh, placements, [(dim, axes)] if axes and dim is not None else None)

    return make(Shard(_BATCH), _BATCH), make(Shard(0), 0), make(Partial(), None)


def _redistributed(p: Writer, given: dict[str, Any], rows: Layout, states: Layout) -> dict[str, Any]:
    """The arguments as the local op takes them."""
    moved = dict(given)
    for name, value in given.items():
        if not isinstance(value, Planned) or name == "workspace":
            continue
        if name.startswith("weight"):
            moved[name] = p.replicated(value)
        else:
            moved[name] = p.redistribute(value, rows if value.ndim == 3 else states)
    return moved


def _unless_empty(func: OpOverload, otherwise: Callable[..., Any], **given: Any) -> Any:
    """The op, or what it gives for no rows, which it does not take."""
    return func(*given.values()) if given["input"].numel() else otherwise(**given)


def _no_rows(**given: Any) -> tuple[torch.Tensor, ...]:
    x = given["input"]
    output = x.new_zeros((*x.shape[:-1], given["hidden_size"]))
    return output, given["hx_"].clone(), given["cx_"].clone(), x.new_empty(0, dtype=torch.uint8)


def _no_gradients(**given: Any) -> tuple[torch.Tensor, ...]:
    names = ("input", *(f"weight{number + 1}" for number in range(_WEIGHTS)), "hx_", "cx_tmp")
    return tuple([torch.zeros_like(given[name]) for name in names])


RULES: dict[str, Rule] = {
    "mkldnn_rnn_layer.default": Rule(program=lstm_layer),
    "mkldnn_rnn_layer_backward.default": Rule(program=lstm_layer_backward),
}
