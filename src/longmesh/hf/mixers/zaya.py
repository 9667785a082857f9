"""ZAYA's projection: q and k pass two short convolutions one after the other, half of v is that of the token before.

Before a document's first token the inputs of the first convolution are zeros, so those of the second are its bias.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from longmesh.errors import LongmeshError
from longmesh.hf.mixers.convolution import causal_conv1d_fn
from longmesh.hf.mixers.kernels import current_recurrence, refuse_cache
from longmesh.hf.state import current


def project(self: Any, hidden_states: Tensor, past_key_values: Any, conv_mask: Any = None) -> Any:
    """ZayaCCAProjection.forward on this rank's tokens."""
    if past_key_values is not None:
        refuse_cache()
    batch = current().batch
    if self.q_proj.bias is not None and batch is not None and any(batch.left_padding):
        raise LongmeshError(
            "hf.context_parallel: ZAYA with attention_bias lets the projections of padding into the tokens after it; "
            "pad on the right"
        )
    heads = (*hidden_states.shape[:-1], -1, self.head_dim)
    queries, keys = self.q_proj(hidden_states), self.k_proj(hidden_states)
    grouped = (*hidden_states.shape[:-1], -1, self.num_key_value_groups, self.head_dim)
    query_residual = (queries.view(grouped) + keys.view(heads).unsqueeze(-2)) * 0.5
    key_residual = query_residual.mean(dim=-2)
    mixed = _convolve_grouped(
        self.conv_qk_depthwise, self.conv_qk_grouped, torch.cat([queries, keys], -1).mT
    ).mT
    query, key = mixed.split([queries.shape[-1], keys.shape[-1]], -1)
    before = _shift(self.v_proj_delayed(hidden_states), self.v_proj_delayed.bias)
    value = torch.cat([self.v_proj_current(hidden_states), before], -1).view(heads)
    return query.view(heads) + query_residual.flatten(-3, -2), key.view(heads) + key_residual, value


def _convolve_grouped(first: nn.Conv1d, second: nn.Conv1d, x: Tensor) -> Tensor:
    """The second convolution of the first: (batch, channels, tokens)."""
    mid = causal_conv1d_fn(x, first.weight.squeeze(1), first.bias)
    width, out = second.kernel_size[0], None
    for lag in range(width):
        part = torch.nn.functional.conv1d(
            mid, second.weight[..., width - 1 - lag : width - lag], groups=second.groups
        )
        out = part if out is None else out + part
        if lag + 1 < width:
            mid = _shift(mid.mT, first.bias).mT
    assert out is not None, "a convolution has a width"
    return out if second.bias is None else out + second.bias[:, None]


def _shift(x: Tensor, outside: Tensor | None) -> Tensor:
    """The token before each; `outside` before a document's first: (batch, tokens, features)."""
    layers = current_recurrence()
    return layers.token_shift(x) if outside is None else layers.token_shift(x - outside) + outside


def parts(module: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """What is replaced of a layer of this kind: (module, name of its method, ours)."""
    return [(module, "forward", project)]
