"""A mixer's forward with our kernels in the place of its own, for as long as a scope is open.

    type(mixer).forward   code + globals of its module         causal_conv1d_fn, torch_chunk_gated_delta_rule, ...
    mixer.forward         the same code + the globals, ours    bound to the instance, removed at the end

A layer that writes its recurrence out has methods of its own replaced, on the instance too. A layer of a user's own has
a method `cut_forward(self, recurrence, ...)`, which is called in the place of its forward.

Layers are recognised by what they run: a forward that calls functions of transformers, or the forward of one of its
classes. A function of a user's own with the same name, or a subclass with another forward, is left alone.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from longmesh.hf.mixers import convolution, delta, mamba, minimax, recurrent_gemma, rwkv, xlstm, zaya
from longmesh.hf.mixers.kernels import current_recurrence, with_globals

KERNELS: dict[str, Callable[..., Any]] = {**convolution.KERNELS, **delta.KERNELS, **mamba.KERNELS}
# Classes of transformers that write their recurrence out: what of their layers is replaced.
WRITTEN_OUT = {
    "MiniMaxLightningAttention": minimax.parts,
    "RecurrentGemmaRecurrentBlock": recurrent_gemma.parts,
    "RwkvSelfAttention": rwkv.parts,
    "RwkvFeedForward": rwkv.parts,
    "xLSTMBackend": xlstm.parts,
    "ZayaCCAProjection": zaya.parts,
}
_Replaced = list[tuple[nn.Module, str, Callable[..., Any]]]


def is_mixer(module: nn.Module) -> bool:
    """Whether the module is a recurrent layer of a kind that we know, or that knows how to be cut."""
    return _find_parts(module) is not None


def bind_mixer(mixer: nn.Module) -> Callable[[], None]:
    """Let a mixer run with our kernels. Returns what undoes it."""
    find = _find_parts(mixer)
    assert find is not None, "only mixers are bound"
    replaced = find(mixer)
    before = [(module, name, module.__dict__.get(name)) for module, name, _ in replaced]
    for module, name, function in replaced:
        setattr(module, name, types.MethodType(function, module))

    def undo() -> None:
        for module, name, was in before:
            delattr(module, name)
            if was is not None:
                setattr(module, name, was)

    return undo


def _find_parts(module: nn.Module) -> Callable[[nn.Module], _Replaced] | None:
    """What makes the list of what is replaced of a module: (module, name of a method, ours)."""
    if hasattr(type(module), "cut_forward"):
        return _own
    forward = inspect.unwrap(type(module).forward)
    owner = next((kind for kind in type(module).__mro__ if "forward" in vars(kind)), nn.Module)
    if _is_of_transformers(owner) and owner.__name__ in WRITTEN_OUT:
        return WRITTEN_OUT[owner.__name__]
    return _calling if isinstance(forward, types.FunctionType) and _called_kernels(forward) else None


def _called_kernels(forward: types.FunctionType) -> dict[str, Callable[..., Any]]:
    """Ours for the functions of transformers that a forward calls."""
    known = forward.__globals__
    return {
        name: KERNELS[name]
        for name in forward.__code__.co_names
        if name in KERNELS and _is_of_transformers(known.get(name))
    }


def _is_of_transformers(thing: Any) -> bool:
    return getattr(thing, "__module__", "").partition(".")[0] == "transformers"


def _calling(module: nn.Module) -> _Replaced:
    return [(module, "forward", with_globals(module, _called_kernels(inspect.unwrap(type(module).forward))))]


def _own(module: nn.Module) -> _Replaced:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.cut_forward(current_recurrence(), *args, **kwargs)

    return [(module, "forward", forward)]
