"""A mixer's forward with our kernels in the place of its own, for as long as a scope is open.

    type(mixer).forward   code + globals of its module         causal_conv1d_fn, torch_chunk_gated_delta_rule, ...
    mixer.forward         the same code + the globals, ours    bound to the instance, removed at the end

A layer that writes its recurrence out has methods of its own replaced, on the instance too.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from longmesh.hf.mixers import convolution, delta, mamba, minimax, recurrent_gemma, rwkv, xlstm, zaya
from longmesh.hf.mixers.bind_globals import with_globals

KERNELS: dict[str, Callable[..., Any]] = {**convolution.KERNELS, **delta.KERNELS, **mamba.KERNELS}
# Layers that write their recurrence out, by class: what of them is replaced.
WRITTEN_OUT = {
    "MiniMaxLightningAttention": minimax.parts,
    "RecurrentGemmaRecurrentBlock": recurrent_gemma.parts,
    "RwkvSelfAttention": rwkv.parts,
    "RwkvFeedForward": rwkv.parts,
    "xLSTMBackend": xlstm.parts,
    "ZayaCCAProjection": zaya.parts,
}


def is_mixer(module: nn.Module) -> bool:
    """Whether the module is a recurrent layer of a kind that we know."""
    return type(module).__name__ in WRITTEN_OUT or _calls_kernels(module)


def _calls_kernels(module: nn.Module) -> bool:
    forward = inspect.unwrap(type(module).forward)
    return isinstance(forward, types.FunctionType) and not KERNELS.keys().isdisjoint(
        forward.__code__.co_names
    )


def bind_mixer(mixer: nn.Module) -> Callable[[], None]:
    """Let a mixer run with our kernels. Returns what undoes it."""
    parts = WRITTEN_OUT.get(type(mixer).__name__)
    replaced = [(mixer, "forward", with_globals(mixer, KERNELS))] if parts is None else parts(mixer)
    before = [(module, name, module.__dict__.get(name)) for module, name, _ in replaced]
    for module, name, function in replaced:
        setattr(module, name, types.MethodType(function, module))

    def undo() -> None:
        for module, name, was in before:
            delattr(module, name)
            if was is not None:
                setattr(module, name, was)

    return undo
