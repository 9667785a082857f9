"""Gated delta rules: Qwen3-Next, Qwen3.5, OLMo hybrid, and with a decay per feature Kimi Linear and Bailing hybrid."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longmesh.hf.mixers.kernels import current_recurrence, refuse_cache
from longmesh.recurrent.transition import state_dtype


def chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """(batch, tokens, heads, features), as transformers' functions for both kinds of decay."""
    if initial_state is not None or output_final_state:
        refuse_cache()
    heads = value.shape[2]
    query, key = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (query, key))
    wide = state_dtype(value)
    q, k, v, g, beta = (x.to(wide) for x in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    out = current_recurrence().gated_delta_rule(q, k, v, g, beta)
    assert isinstance(out, Tensor), "no final state was asked for"
    return out.to(query.dtype), None


def recurrent_delta_rule(*args: Any, **kwargs: Any) -> Any:
    refuse_cache()


KERNELS = {
    "torch_chunk_gated_delta_rule": chunk_gated_delta_rule,
    "chunk_kimi_delta_attention": chunk_gated_delta_rule,
    "torch_recurrent_gated_delta_rule": recurrent_delta_rule,
    "recurrent_kimi_delta_attention": recurrent_delta_rule,
}
