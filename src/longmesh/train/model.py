"""A byte-level transformer: RMSNorm, rotary positions, grouped key heads, gated feed-forward.

It works on any part of a sequence: a token comes with its position, and `attend` is whatever attention the caller has,
over this part alone or over a sequence that is cut over ranks. Shapes: B batch, S tokens here, H heads, E head dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longmesh.train.options import VOCAB

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class SelfAttention(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        q, k, v = (self._heads(w(x)) for w in (self.wq, self.wk, self.wv))
        out_BHSE = attend(rotate(q, turns), rotate(k, turns), v)
        return self.wo(out_BHSE.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        """(B, S, H * E) -> (B, H, S, E), for as many heads as this rank has."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(dim, 1e-5), SelfAttention(dim, heads, kv_heads)
        self.feed_forward_norm, self.feed_forward = nn.RMSNorm(dim, 1e-5), FeedForward(dim, 3 * dim)

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turns, attend)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Transformer(nn.Module):
    """Its weights depend on `seed` and the sizes alone."""

    def __init__(self, *, dim: int, layers: int, heads: int, kv_heads: int, seed: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.embedding = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(TransformerBlock(dim, heads, kv_heads) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, 1e-5)
        self.head = nn.Linear(dim, VOCAB, bias=False)
        random = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02, generator=random)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Logits (B, S, VOCAB) of tokens (B, S) that stand at `positions` (S) of the sequence."""
        turns = make_turns(positions, self.head_dim)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, turns, attend)
        return self.head(self.norm(x))


def make_turns(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines (S, E / 2) of the angles by which features of a position are turned."""
    rates = 10000.0 ** (
        -torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    )
    angles = positions[:, None] * rates
    return angles.cos(), angles.sin()


def rotate(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Turn feature i together with feature i + E / 2 of (B, H, S, E)."""
    cos, sin = turns
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
