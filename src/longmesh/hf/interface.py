"""What transformers calls: an attention function and a mask function, registered under one name.

Pitfall: transformers calls the mask function once per forward and kind of mask, before any layer, and skips it for
models that build their masks themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from longmesh.attention import ContextParallel, masks
from longmesh.attention.scope.cut_mask import CutMask
from longmesh.attention.scope.cut_sequence import CutSequence
from longmesh.attention.scope.intercept import attends_locally
from longmesh.attention.scope.open_scopes import current_cut
from longmesh.attention.scope.reentrant import refuse_reentrant_checkpoint
from longmesh.errors import LongmeshError
from longmesh.hf import private
from longmesh.hf.cached_attention import CachedLength, attend_cached, cached_mask
from longmesh.hf.cached_keys import CachedKeys
from longmesh.hf.gather import dense
from longmesh.hf.mask_functions import mask_of
from longmesh.hf.open_batch import as_whole, current_batch, current_inspection, is_fusing, is_whole
from longmesh.hf.positions import temper

NAME = "longmesh"


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
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: (batch, heads, tokens, head dim) in, (batch, tokens, heads, head dim) out."""
    cut, batch = current_cut(), current_batch()
    if isinstance(key, CachedKeys):
        _refuse_unknown(module, {"position_bias": position_bias, **kwargs})
        return attend_cached(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=s_aux,
        )
    if cut is None and isinstance(attention_mask, CutMask):
        raise LongmeshError(
            f"{type(module).__name__} runs with a mask of hf.context_parallel after its scope was left: call "
            "backward() inside the scope, where activation checkpoints run layers again"
        )
    if cut is None or is_whole() or (batch is not None and batch.is_outside(module)):
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
    _refuse_unknown(module, {"position_bias": position_bias, **kwargs})
    if current_inspection() is not None:
        return token_by_token(query, key, value).transpose(1, 2).contiguous(), None
    refuse_reentrant_checkpoint()
    engine = _engine(cut, module, attention_mask, is_causal, sliding_window)
    if batch is not None and module in batch.tempered:
        query = temper(module, query, batch.local_places)
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


def _engine(
    cut: CutSequence, module: nn.Module, mask: Any, is_causal: bool | None, window: int | None
) -> ContextParallel:
    """The engine for a call's mask. A mask says all; without one, the module is causal as it is for sdpa."""
    if isinstance(mask, CutMask):
        lo, hi = mask.mask.band() or (0, 0)
        if lo > hi:
            raise LongmeshError(
                f"{type(module).__name__} has a sliding window of 0 tokens; set sliding_window to 1 or more"
            )
        return cut.engine_with(mask.mask)
    if mask is not None:
        raise LongmeshError(
            "a mask tensor over a cut sequence: the model would need this rank's part of it; give padding and "
            "documents to hf.context_parallel(mesh, batch), which plans attention from them"
        )
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    return cut.engine(causal, window=window)


# What models hand to attention that does not change it: it was used before, or speaks of the whole row.
_NOT_ATTENTION = frozenset(
    ("position_ids", "cache_position", "position_embeddings", "labels", "shift_labels", "num_items_in_batch")
)


def _refuse_unknown(module: nn.Module, given: dict[str, Any]) -> None:
    names = [
        name for name, value in given.items() if isinstance(value, Tensor) and name not in _NOT_ATTENTION
    ]
    if names:
        raise LongmeshError(
            f"{type(module).__name__} gives attention {', '.join(names)}, which over a cut sequence would be this "
            "rank's part only: this model can't run in hf.context_parallel as it is"
        )


def attend_directly(
    cut: CutSequence, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """F.scaled_dot_product_attention of a model that calls it by itself."""
    if current_inspection() is not None:
        return token_by_token(query, key, value)
    if is_whole():
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, *args, **kwargs)
    return cut.attend(query, key, value, *args, **kwargs)


def attend_in_module(*args: Any, **kwargs: Any) -> Any:
    """nn.MultiheadAttention, which may look at features that are not cut."""
    if not is_whole():
        raise attends_locally(torch.nn.functional.multi_head_attention_forward)
    return torch.nn.functional.multi_head_attention_forward(*args, **kwargs)


def token_by_token(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """In place of attention while a model is inspected: depends on q, k and v of each token, and on no other token."""
    heads = query.shape[1] // key.shape[1]
    weight = query.float().sum(-1) + 2 * key.float().sum(-1).repeat_interleave(heads, 1)
    return value.repeat_interleave(heads, 1) * (1 + weight.tanh()).to(value.dtype)[..., None]


def _by_sdpa(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    if kwargs.pop("s_aux") is not None:
        raise LongmeshError(
            "attention sinks outside hf.context_parallel: use attn_implementation='eager' there"
        )
    with as_whole():  # a scope's F.scaled_dot_product_attention is torch's own here
        return private.sdpa(module, *args, **kwargs)


def _capped(limit: float) -> Callable[..., Tensor]:
    return lambda score, b, h, q_idx, kv_idx: limit * torch.tanh(score / limit)


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
    if isinstance(kv_length, CachedLength):
        return cached_mask(kv_length, batch_size, q_length, mask_function, attention_mask, device)
    batch = current_batch()
    of_features = is_fusing() and batch is not None and q_length != batch.length
    if current_cut() is None or of_features:
        return private.sdpa_mask(
            batch_size,
            q_length,
            kv_length,
            *args,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=allow_is_causal_skip,
            device=device,
            **kwargs,
        )
    mask = mask_of(mask_function, batch) or masks.full()
    if is_whole() and not is_fusing() and batch is not None and current_inspection() is None:
        return dense(mask, batch)
    is_known = is_fusing() or current_inspection() is not None
    if not is_known and attention_mask is not None and not bool(attention_mask.all()):
        raise LongmeshError(
            "a padding mask inside hf.context_parallel: pass it in the batch given to the scope, which cuts it"
        )
    if torch.compiler.is_compiling() and mask == masks.causal() and allow_is_causal_skip:
        return None
    return CutMask.of(mask, batch_size, q_length, device)
