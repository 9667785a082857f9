"""Products of tokens of one chunk, weighted by what decays between them, without ever overflowing.

    scalar     P[i, j] = (a_i . b_j) exp(G_i - G_j)                    G: running sum of log decays, one number a head
    diagonal   P[i, j] = sum_d a_i[d] b_j[d] exp(G_i[d] - G_j[d])      one number a feature

For j <= i the exponent is at most 0. The diagonal form is a matrix product of a exp(G) and b exp(-G), whose second
factor overflows when decay is strong; so it is taken against a reference between the two: the beginning of i's
block of 16 tokens, where both exponents are at most 0. Pairs inside one block are computed one by one.

Shapes: N chunks, B batch, H heads, C tokens, K features; G is (N, B, H, C, 1) or (N, B, H, C, K).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from longmesh.recurrent.chunks import Chunks

_BLOCK = 16


def running_decay(g: Tensor) -> Tensor:
    """G, the running sum of log decays. A decay to nothing, -inf, is the least number whose exp is 0: differences of
    infinities are none."""
    lowest = 1.2 * math.log(torch.finfo(g.dtype).tiny)
    return g.clamp_min(lowest).cumsum(-2)


def decayed_products(a: Tensor, b: Tensor, decay: Tensor, chunks: Chunks, *, strict: bool = False) -> Tensor:
    """P (N, B, H, C, C), zero where a token may not see another (itself, if `strict`)."""
    if decay.shape[-1] == 1:
        weights = chunks.pairs(decay - decay.mT, strict=strict).exp()
        return (a @ b.mT) * weights
    products = _blockwise(a, b, decay)
    return torch.where(chunks.pairs(products.detach(), strict=strict).isneginf(), 0, products)


def _blockwise(a: Tensor, b: Tensor, decay: Tensor) -> Tensor:
    """Rows of pairs, a block of 16 tokens at a time; what lies above the diagonal of blocks stays zero."""
    size = a.shape[-2]
    rows: list[Tensor] = []
    for start in range(0, size, _BLOCK):
        stop = min(start + _BLOCK, size)
        here, before = slice(start, stop), slice(0, start)
        parts = [_inside(a[..., here, :], b[..., here, :], decay[..., here, :])]
        if start:
            edge = decay[..., start - 1 : start, :]
            left = a[..., here, :] * (decay[..., here, :] - edge).exp()
            right = b[..., before, :] * (edge - decay[..., before, :]).exp()
            parts.insert(0, left @ right.mT)
        if stop < size:
            parts.append(a.new_zeros((*a.shape[:-2], stop - start, size - stop)))
        rows.append(torch.cat(parts, -1))
    return torch.cat(rows, -2)


def _inside(a: Tensor, b: Tensor, decay: Tensor) -> Tensor:
    difference = decay.unsqueeze(-2) - decay.unsqueeze(-3)
    size = a.shape[-2]
    later = torch.ones(size, size, dtype=torch.bool, device=a.device).triu(1).unsqueeze(-1)
    weights = difference.masked_fill(later, -torch.inf).exp()
    return torch.einsum("...ik,...ijk,...jk->...ij", a, weights, b)
