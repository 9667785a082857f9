"""RWKV 4: tokens shifted by one, and a weighted mean with a running maximum. It knows no padding: what is left of a
row's tokens is part of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from longmesh.hf.mixers.bind_globals import with_globals
from longmesh.hf.mixers.state import current_recurrence, refuse_cache


def shift(self: Any, x: Tensor) -> Tensor:
    """nn.ZeroPad2d.forward of a token shift: (batch, tokens, features)."""
    layers = current_recurrence(through_padding=True)
    return torch.zeros_like(x) if layers is None else layers.token_shift(x)


def linear_attention(
    time_decay: Tensor,
    time_first: Tensor,
    key: Tensor,
    value: Tensor,
    state: Any = None,
    return_state: bool = False,
) -> tuple[Tensor, None]:
    """As transformers' function of this name: (batch, tokens, channels)."""
    if state is not None or return_state:
        refuse_cache()
    layers = current_recurrence(through_padding=True)
    if layers is None:
        return value * (1 + (key + time_first - time_decay).tanh()), None
    return layers.wkv(key, value, -torch.exp(time_decay), time_first), None


def parts(module: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """What is replaced of a layer of this kind: (module, name of its method, ours)."""
    replaced: list[tuple[nn.Module, str, Any]] = [(module.get_submodule("time_shift"), "forward", shift)]
    if type(module).__name__ == "RwkvSelfAttention":
        replaced.append(
            (module, "forward", with_globals(module, {"rwkv_linear_attention": linear_attention}))
        )
    return replaced
