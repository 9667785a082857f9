"""What the attention benchmarks share: inputs, packed documents, and attention as one would write it by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

HEADS, DIM = 8, 64
Pieces = Callable[[Tensor, Tensor, Tensor], list[Tensor]]


def inputs(length: int) -> list[Tensor]:
    """q, k, v and the output's gradient."""
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(1, HEADS, length, DIM, generator=draw) for _ in range(4)]


def packed_lengths(total: int, mean: int) -> list[int]:
    """Heavy-tailed document lengths that add up to `total`, none above a quarter of it."""
    draw, lengths = np.random.default_rng(0), []
    while sum(lengths) < total:
        drawn = int(np.clip(draw.lognormal(np.log(mean), 1.2), 1, total // 4))
        lengths.append(min(drawn, total - sum(lengths)))
    return lengths


def by_hand(pieces: Pieces, tensors: list[Tensor], backward: bool) -> Callable[[], None]:
    """SDPA calls over `pieces`, joined; backward by autograd."""
    q, k, v = (t.detach().requires_grad_(backward) for t in tensors[:3])

    def run() -> None:
        with torch.set_grad_enabled(backward):
            parts = pieces(q, k, v)
            out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        if backward:
            torch.autograd.grad(out, (q, k, v), tensors[3])

    return run


def causal_pieces(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    return [F.scaled_dot_product_attention(q, k, v, is_causal=True)]


def document_pieces(lengths: list[int]) -> Pieces:
    def pieces(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        split = zip(*(t.split(lengths, dim=2) for t in (q, k, v)), strict=True)
        return [F.scaled_dot_product_attention(a, b, c, is_causal=True) for a, b, c in split]

    return pieces


def window_pieces(window: int) -> Pieces:
    """Blocks of `window` queries with their 2 * `window` keys, and a mask shared by all of them.

    Cut by `split` and joined by `cat`: the gradient of a slice would be a zero tensor of the whole
    length for each block, which about doubles the loop's time and would flatter us.
    """
    i, j = torch.arange(window)[:, None], torch.arange(-window, window)
    mask = torch.zeros(window, 2 * window).masked_fill_((j > i) | (j < i - window), -torch.inf)

    def pieces(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        qs, ks, vs = (t.split(window, dim=2) for t in (q, k, v))
        found = causal_pieces(qs[0], ks[0], vs[0])
        for a in range(1, len(qs)):
            keys, values = torch.cat(ks[a - 1 : a + 1], dim=2), torch.cat(vs[a - 1 : a + 1], dim=2)
            found.append(F.scaled_dot_product_attention(qs[a], keys, values, attn_mask=mask))
        return found

    return pieces


def compiled_flex_window(tensors: list[Tensor], window: int) -> Callable[[], None]:
    """FlexAttention's forward, compiled: a minute, and a C++ compiler. It has no backward on CPU."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def visible(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (i - j <= window)

    length = tensors[0].shape[2]
    mask = torch.compile(create_block_mask)(visible, None, None, length, length, device="cpu")
    attention = torch.compile(flex_attention)

    def run() -> None:
        with torch.no_grad():
            attention(tensors[0], tensors[1], tensors[2], block_mask=mask)

    return run
