"""What transformers calls: an attention function and a mask function, registered under one name.

Pitfall: transformers calls the mask function once per forward and kind of mask, before any layer, and skips it for
models that build their masks themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from longmesh.attention.scope.open_scopes import current_cut
from longmesh.attention.scope.reentrant import refuse_reentrant_checkpoint
from longmesh.errors import LongmeshError

NAME = "longmesh"


def register() -> None:
    """Make attn_implementation="longmesh" known to transformers: its attention and its masks.

    >>> from transformers import AutoModelForCausalLM, LlamaConfig
    >>> register()
    >>> config = LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    >>> model = AutoModelForCausalLM.from_config(config, attn_implementation="longmesh")
    """
    attention, mask = _interfaces()
    attention.register(NAME, attend)
    mask.register(NAME, no_mask)


def _interfaces() -> tuple[Any, Any]:
    try:
        from transformers.masking_utils import AttentionMaskInterface
        from transformers.modeling_utils import AttentionInterface
    except ImportError as error:
        raise ImportError("longmesh.hf needs transformers: pip install 'longmesh[hf]'") from error
    return AttentionInterface, AttentionMaskInterface


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
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: (batch, heads, tokens, head dim) in, (batch, tokens, heads, head dim) out."""
    cut = current_cut()
    if cut is None:
        return _by_sdpa(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            softcap=softcap,
            s_aux=s_aux,
            position_bias=position_bias,
            **kwargs,
        )
    if attention_mask is not None or position_bias is not None:
        raise LongmeshError(
            "a mask tensor or position bias over a cut sequence: the model would need this rank's part of it; give "
            "padding and documents to hf.context_parallel(mesh, batch), which plans attention from them"
        )
    refuse_reentrant_checkpoint()
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    engine = cut.engine(causal, window=sliding_window)
    out = engine(
        query,
        key,
        value,
        scale=scaling,
        score_mod=None if softcap is None else _capped(softcap),
        sinks=s_aux,
        dropout_p=dropout,
        dropout_seed=cut.common_seed() if dropout else None,
    )
    return out.transpose(1, 2).contiguous(), None


def _by_sdpa(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if kwargs.pop("s_aux") is not None:
        raise LongmeshError(
            "attention sinks outside hf.context_parallel: use attn_implementation='eager' there"
        )
    return sdpa_attention_forward(module, *args, **kwargs)


def _capped(limit: float) -> Callable[..., Tensor]:
    return lambda score, b, h, q_idx, kv_idx: limit * torch.tanh(score / limit)


def no_mask(
    *args: Any,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    config: Any = None,
    **kwargs: Any,
) -> Any:
    """transformers' mask function: none over a cut sequence, where the engine knows the mask; sdpa's elsewhere."""
    from transformers.masking_utils import sdpa_mask

    if current_cut() is None:
        return sdpa_mask(*args, attention_mask=attention_mask, use_vmap=use_vmap, config=config, **kwargs)
    if use_vmap:
        raise LongmeshError(
            "the model adds a mask function of its own, which sees this rank's indices; over a cut sequence give the "
            "mask to hf.context_parallel(mesh, batch, mask=...)"
        )
    if getattr(config, "attention_chunk_size", None) is not None:
        raise LongmeshError(
            "chunked attention of the model over a cut sequence is not supported; give "
            "mask=masks.chunked(n) to hf.context_parallel and unset attention_chunk_size"
        )
    if attention_mask is not None and not bool(attention_mask.all()):
        raise LongmeshError(
            "a padding mask inside hf.context_parallel: pass it in the batch given to the scope, which cuts it"
        )
    return None
