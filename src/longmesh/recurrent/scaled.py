"""Layers that weigh tokens by exponentials of what they say themselves: RWKV 4 and xLSTM's matrix memory.

Numerator and denominator are states; both are scaled by exp(-m), m the running maximum (running_max.py), so nothing
overflows. Two exchanges: the maximum, one number a channel or head, and then the scaled states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longmesh.recurrent.transition import state_dtype

if TYPE_CHECKING:
    from longmesh.recurrent.recurrent_parallel import RecurrentParallel

_NEVER = -1e4  # the logarithm of a decay to nothing, without an infinity in running sums


def wkv(layers: RecurrentParallel, k: Tensor, v: Tensor, decay: Tensor, first: Tensor) -> Tensor:
    """RWKV 4: (batch, tokens, channels). Collective."""
    dtype, wide = v.dtype, state_dtype(k, v)
    k, v, decay, first = (x.to(wide) for x in (k, v, decay, first))
    found = layers.running_max(k, decay.expand_as(k))
    weight, scaled = (k - found.values).exp(), found.scaled_decay(decay)
    states = layers.diagonal_scan(torch.cat([weight * v, weight], -1), torch.cat([scaled, scaled], -1))
    assert isinstance(states, Tensor), "no final state was asked for"
    numerator, denominator = layers.token_shift(states).chunk(2, -1)
    own = k + first
    most = torch.maximum(found.before, own.detach())
    earlier, now = (found.before - most).exp(), (own - most).exp()
    return ((earlier * numerator + now * v) / (earlier * denominator + now)).to(dtype)


def mlstm(
    layers: RecurrentParallel, q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, eps: float
) -> Tensor:
    """xLSTM: (batch, tokens, heads, features). Collective."""
    dtype, wide = v.dtype, state_dtype(q, k, v)
    q, k, v, i, f = (x.to(wide) for x in (q, k, v, i, f))
    start = torch.where(layers.begins.to(i.device).unsqueeze(-1), torch.maximum(i, f), i)
    found = layers.running_max(start, f)
    # The maximum again, as a recurrence of what it was made of: for its gradient, which only eps makes.
    carried = found.before + f >= start
    maximum = layers.diagonal_scan(torch.where(carried, f, start), torch.where(carried, 0.0, _NEVER).to(wide))
    assert isinstance(maximum, Tensor), "no final state was asked for"
    eps_factor = (maximum - maximum.detach()).exp().unsqueeze(-1)  # 1, with a gradient
    values = torch.cat([v, v.new_ones(*v.shape[:-1], 1)], -1)
    keys = k * (i - found.values).exp().unsqueeze(-1)
    read = layers.linear_attention(q, keys, values, found.scaled_decay(f), scale=k.shape[-1] ** -0.5)
    assert isinstance(read, Tensor), "no final state was asked for"
    numerator, denominator = read.split([v.shape[-1], 1], -1)
    floor = torch.maximum(denominator.abs(), (-found.values).exp().unsqueeze(-1))
    return (numerator / (floor + eps * eps_factor)).to(dtype)
