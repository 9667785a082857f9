"""Partial attention of a few queries over this rank's keys, on any device, by matrix products.

Shapes: n new tokens of a sequence, H query heads, G key heads, R = H / G, L = R * n rows, K local tokens, D head dim
of keys, E of values.

The queries of all heads that share a key head are rows of one matrix, so that each key is read once; keys are read in
their own dtype, and upcast tile by tile. Results are fp32 (fp64 for fp64), with lse -inf and output 0 for a query that
sees none of the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from longmesh.attention.kernel.merge import accumulate_dtype
from longmesh.cache.store import Piece

_SCORES = 1 << 21  # of one tile
_UPCAST = 1 << 19  # elements of keys of one tile, where they are upcast

Visible = Callable[
    [int, int], Tensor | None
]  # (first local token, how many) -> (n, tokens), None if all are seen


def attend_pieces(
    q_nHD: Tensor, pieces: Sequence[Piece], visible: Visible, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Output (n, H, E) and log-sum-exp (n, H). There is at least one piece."""
    n, H, D = q_nHD.shape
    G = pieces[0].k_GKD.shape[0]
    dtype = accumulate_dtype(q_nHD.dtype)
    q_GLD = (q_nHD.to(dtype) * scale).view(n, G, H // G, D).permute(1, 2, 0, 3).reshape(G, -1, D)
    found = [
        _attend_tile(q_GLD, k.to(dtype), v.to(dtype), visible(index, k.shape[1]), softcap)
        for piece in pieces
        for index, k, v in _tiles(piece, q_GLD.shape[1], dtype)
    ]
    out, lse = found[0] if len(found) == 1 else merge_stacked(*map(torch.stack, zip(*found, strict=True)))
    out = out.view(G, H // G, n, -1).permute(2, 0, 1, 3).reshape(n, H, -1)
    return out, lse.view(G, H // G, n).permute(2, 0, 1).reshape(n, H)


def _tiles(piece: Piece, rows: int, dtype: torch.dtype) -> Iterable[tuple[int, Tensor, Tensor]]:
    """The piece in tiles that bound the memory of a product, each with its first local token."""
    first, k, v = piece
    G, K, D = k.shape
    most = max(1, _SCORES // (G * rows))
    if k.dtype != dtype:
        most = max(1, min(most, _UPCAST // (G * D)))
    for start in range(0, K, most):
        yield first + start, k[:, start : start + most], v[:, start : start + most]


def _attend_tile(
    q_GLD: Tensor, k_GKD: Tensor, v_GKE: Tensor, seen_nK: Tensor | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """(G, L, E) and (G, L)."""
    s = torch.bmm(q_GLD, k_GKD.mT)
    if softcap is not None:
        s = s.div_(softcap).tanh_().mul_(softcap)
    if seen_nK is None:
        highest = s.amax(2)
        p = s.sub_(highest.unsqueeze(-1)).exp_()
        total = p.sum(2)
        return torch.bmm(p, v_GKE).div_(total.unsqueeze(-1)), total.log_().add_(highest)
    G, L, K = s.shape
    s.view(G, L // len(seen_nK), len(seen_nK), K).masked_fill_(~seen_nK, -torch.inf)
    highest = s.amax(2)
    highest.masked_fill_(highest == -torch.inf, 0.0)
    p = s.sub_(highest.unsqueeze(-1)).exp_()
    total = p.sum(2)
    out = torch.bmm(p, v_GKE) / total.masked_fill(total == 0, 1.0).unsqueeze(-1)
    return out, total.log_().add_(highest)


def merge_stacked(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Partial results over disjoint keys, stacked in the first dim, as one. The same bits for the same input."""
    highest = lses.amax(0)
    highest = highest.masked_fill(highest == -torch.inf, 0.0)
    weights = (lses - highest).exp_()
    total = weights.sum(0)
    out = (outs * weights.unsqueeze(-1)).sum(0) / total.masked_fill(total == 0, 1.0).unsqueeze(-1)
    return out, total.log() + highest
