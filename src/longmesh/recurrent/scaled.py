"""Layers that weigh tokens by exponentials of what they say themselves: RWKV 4 and xLSTM's matrix memory.

    num_t = exp(decay_t) num_(t-1) + exp(x_t) v_t        overflows where x is large

    scaled by exp(-m_t):   the decay becomes  decay_t + m_(t-1) - m_t <= 0,   the weight  exp(x_t - m_t) <= 1

m is a running maximum over the cut sequence, m_t = max(m_(t-1) + decay_t, x_t). Numerator and denominator are states,
both scaled by it, so nothing overflows. Two exchanges: the maximum, one number a channel or head, and then the scaled
states, a recurrence like any other. The layer's outputs do not depend on m, which gets no gradient.

Shapes: B batch, T tokens, H heads or channels; N chunks of C tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from longmesh.recurrent.chain import Chain, start_walk
from longmesh.recurrent.chunks import Chunks
from longmesh.recurrent.transition import MAXIMUM, Transitions, state_dtype


class RunningMax(NamedTuple):
    """`values` m_t and `before` m_(t-1), which is -inf where a document begins: (B, T, H), without gradients."""

    values: Tensor
    before: Tensor

    def scaled_decay(self, decay: Tensor) -> Tensor:
        """The decay of states that are scaled by exp(-m): 0, which counts for nothing, where a document begins."""
        return torch.where(self.before.isneginf(), 0.0, decay + self.before - self.values)


@torch.no_grad()
def running_max(chain: Chain, chunks: Chunks, x: Tensor, decay: Tensor) -> RunningMax:
    """x and decay (B, T, H). Collective."""
    lowest = -torch.inf
    x_NBHC, decay_NBHC = _split(x, chunks, lowest), _split(decay, chunks, 0.0)
    left_NBHC = decay_NBHC.cumsum(-1)
    if chunks.enters is not None:
        left_NBHC = left_NBHC.masked_fill(chunks.enters.squeeze(-1) == 0, lowest)
    local_NBHC = _walk(x_NBHC, decay_NBHC, chunks)
    transitions = Transitions(left_NBHC[..., -1], MAXIMUM)
    updates = local_NBHC[..., -1]
    entering, _ = start_walk(chain, transitions, updates, None)()
    values = torch.maximum(local_NBHC, left_NBHC + entering.unsqueeze(-1))
    before = torch.cat([entering.unsqueeze(-1), values[..., :-1]], -1)
    if chunks.same is not None and chunks.enters is not None:
        goes_on = torch.ones_like(chunks.same[..., 0], dtype=torch.bool)
        goes_on[..., 1:] = chunks.same.diagonal(-1, -2, -1)
        goes_on[..., 0] = chunks.enters[..., 0, 0] != 0
        before = before.masked_fill(~goes_on, lowest)
    return RunningMax(_join(values, chunks), _join(before, chunks))


def _walk(x: Tensor, decay: Tensor, chunks: Chunks) -> Tensor:
    """The maximum of each chunk alone, from nothing."""
    state = x[..., 0]
    states = [state]
    for t in range(1, chunks.size):
        carried = state + decay[..., t]
        if chunks.same is not None:
            carried = carried.masked_fill(~chunks.same[..., t, t - 1], -torch.inf)
        state = torch.maximum(carried, x[..., t])
        states.append(state)
    return torch.stack(states, -1)


def _split(x: Tensor, chunks: Chunks, padding: float) -> Tensor:
    missing = chunks.count * chunks.size - x.shape[1]
    x = torch.nn.functional.pad(x, (0, 0, 0, missing), value=padding)
    batch, _, heads = x.shape
    return x.view(batch, chunks.count, chunks.size, heads).permute(1, 0, 3, 2).contiguous()


def _join(x: Tensor, chunks: Chunks) -> Tensor:
    count, batch, heads, size = x.shape
    return x.permute(1, 0, 3, 2).reshape(batch, count * size, heads)[:, : chunks.num_tokens]


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
