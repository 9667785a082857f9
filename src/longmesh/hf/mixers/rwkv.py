"""RWKV 4: tokens shifted by one, and a weighted mean with a running maximum. It knows no padding: what is left of a
row's tokens is part of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from longmesh.hf.mixers.kernels import current_recurrence, refuse_cache, with_globals


def shift(self: Any, x: Tensor) -> Tensor:
    """nn.ZeroPad2d.forward of a token shift: (batch, tokens, features)."""
    return current_recurrence(through_padding=True).token_shift(x)


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
    return layers.wkv(key, value, -torch.exp(time_decay), time_first), None


def parts(module: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """What is replaced of a layer of this kind: (module, name of its method, ours)."""
    replaced: list[tuple[nn.Module, str, Any]] = [(module.get_submodule("time_shift"), "forward", shift)]
    if hasattr(module, "time_decay"):  # the other kind only shifts tokens
        replaced.append(
            (module, "forward", with_globals(module, {"rwkv_linear_attention": linear_attention}))
        )
    return replaced
