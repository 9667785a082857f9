"""Mamba 1 and 2, in the models that are made of them and in hybrids."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from longmesh.hf.mixers.kernels import current_recurrence, refuse_cache
from longmesh.recurrent.transition import state_dtype


def selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **kwargs: Any,
) -> Tensor:
    """Mamba 1: (batch, channels, tokens), B and C (batch, n, tokens)."""
    if return_last_state:
        refuse_cache()
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[..., None]
    if delta_softplus:
        dt = torch.nn.functional.softplus(dt)
    out = current_recurrence().selective_scan(hidden_states, dt, A, B, C)
    assert isinstance(out, Tensor), "no final state was asked for"
    if D is not None:
        out = out + hidden_states * D[None, :, None]
    return out if z is None else out * torch.nn.functional.silu(z)


def chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    **kwargs: Any,
) -> Tensor:
    """Mamba 2: (batch, tokens, heads, features), B and C (batch, tokens, groups, n)."""
    if return_final_states or initial_states is not None:
        refuse_cache()
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = torch.nn.functional.softplus(dt)
    dt = dt.clamp(*dt_limit)
    wide = state_dtype(hidden_states)
    x, dt, A, B, C = (each.to(wide) for each in (hidden_states, dt, A, B, C))
    out = current_recurrence().ssd(x, dt, A, B, C)
    assert isinstance(out, Tensor), "no final state was asked for"
    return (out if D is None else out + x * D[..., None]).contiguous()


def fused(*args: Any, **kwargs: Any) -> None:
    """The fused kernels stand for convolution and scan together: without them the mixer calls ours one by one."""


def state_update(*args: Any, **kwargs: Any) -> Any:
    refuse_cache()


KERNELS = {
    "mamba_selective_scan": selective_scan,
    "mamba2_chunk_scan": chunk_scan,
    "mamba_inner_fn": fused,
    "mamba2_split_conv1d_scan_combined": fused,
    "mamba_selective_state_update": state_update,
    "mamba2_selective_state_update": state_update,
}
