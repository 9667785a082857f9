"""MiniMax's lightning attention: linear attention with one fixed decay per head, written out in its forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from longmesh.hf.mixers.kernels import current_recurrence, refuse_cache


def lightning_forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: Any = None,
    attention_mask: Any = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """MiniMaxLightningAttention.forward on this rank's tokens."""
    if past_key_values is not None:
        refuse_cache()
    batch, tokens, _ = hidden_states.shape
    heads, dim = self.num_attention_heads, self.head_dim
    states = self.act_fn(self.qkv_proj(hidden_states)).reshape(batch, tokens, heads, 3 * dim)
    query, key, value = states.split(dim, dim=3)
    decay = -self.slope_rate.view(heads).expand(batch, tokens, heads)
    out = current_recurrence().linear_attention(query, key, value, decay)
    assert isinstance(out, Tensor)
    out = self.norm(out.reshape(batch, tokens, heads * dim))
    out = torch.sigmoid(self.output_gate(hidden_states)) * out
    return self.out_proj(out), None


def parts(module: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """What is replaced of a layer of this kind: (module, name of its method, ours)."""
    return [(module, "forward", lightning_forward)]
