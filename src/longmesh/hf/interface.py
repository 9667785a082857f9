"""What transformers calls: an attention function and a mask function, registered under one name.

Both ask the state that the model runs in (state.py). Keys and lengths of a sharded cache carry a state of their own.

Pitfall: transformers calls the mask function once per forward and kind of mask, before any layer, and skips it for
models that build their masks themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from longmesh.hf import private
from longmesh.hf.cut import state_of
from longmesh.hf.private import NAME
from longmesh.hf.state import AttentionRequest, MaskRequest


def register() -> None:
    """Make attn_implementation="longmesh" known to transformers: its attention and its masks.

    >>> from transformers import AutoModelForCausalLM, LlamaConfig
    >>> register()
    >>> config = LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    >>> model = AutoModelForCausalLM.from_config(config, attn_implementation="longmesh")
    """
    attention, mask = private.interfaces()
    private.check_version()
    attention.register(NAME, attend)
    mask.register(NAME, mask_tensor)
    for classes in private.attention_classes():  # ours is recognised in their eager one
        classes.setdefault(NAME, classes["eager"])


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: (batch, heads, tokens, head dim) in, (batch, tokens, heads, head dim) out."""
    return state_of(key).attend(
        AttentionRequest(
            module, query, key, value, attention_mask,
            dropout, scaling, is_causal, sliding_window, softcap, s_aux, kwargs,
        )
    )  # fmt: skip


def mask_tensor(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *args: Any,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Any:
    """transformers' mask function: over a cut sequence what the mask means, elsewhere sdpa's tensor."""
    return state_of(kv_length).mask(
        MaskRequest(
            batch_size,
            q_length,
            kv_length,
            mask_function,
            attention_mask,
            allow_is_causal_skip,
            device,
            args,
            kwargs,
        )
    )
