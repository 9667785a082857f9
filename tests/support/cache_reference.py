"""A sequence's keys and values in one tensor, and dense float64 attention of new tokens over them."""

from __future__ import annotations

import torch
from torch import Tensor


class Dense:
    """What a cached sequence holds, of one layer."""

    def __init__(self, k: Tensor | None = None, v: Tensor | None = None) -> None:
        self.k, self.v = k, v

    def append(self, q, k, v, *, window=None, sinks=None, softcap=None, scale=None) -> Tensor:
        """(n, heads, head dim) of n new tokens; keys and values as they are cached, in float64."""
        k, v = k.double(), v.double()
        self.k = k if self.k is None else torch.cat([self.k, k])
        self.v = v if self.v is None else torch.cat([self.v, v])
        n, H, D = q.shape
        keys, values = (t.repeat_interleave(H // t.shape[1], 1) for t in (self.k, self.v))
        scores = torch.einsum("nhd,khd->hnk", q.double(), keys) * (D**-0.5 if scale is None else scale)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        at = torch.arange(len(keys) - n, len(keys))[:, None]
        seen = torch.arange(len(keys)) <= at
        if window is not None:
            seen &= torch.arange(len(keys)) > at - window
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(H, n, 1)], -1)
        return torch.einsum("hnk,khe->nhe", scores.softmax(-1)[..., : len(keys)], values)

    def __len__(self) -> int:
        return 0 if self.k is None else len(self.k)

    def crop(self, length: int) -> None:
        if self.k is not None and self.v is not None:
            self.k, self.v = self.k[:length], self.v[:length]

    def fork(self) -> Dense:
        return Dense(self.k, self.v)
