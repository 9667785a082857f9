"""Partial attention of a few queries over pages, on any device.

Shapes: n new tokens of a sequence, H query heads, G key heads, R = H / G, L = R * n rows, P pages, S tokens of a
page, D head dim of keys, E of values.

The queries of all heads that share a key head are rows of one matrix, so that each key is read once; keys are read in
their own dtype, and upcast tile by tile. Results are fp32 (fp64 for fp64), with lse -inf and output 0 for a query that
sees none of the keys. On a CPU torch's fused kernel takes pages as a batch where all queries see all of their keys;
elsewhere it is matrix products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from longmesh._torch import private_op
from longmesh.attention.kernel.merge import accumulate_dtype
from longmesh.cache.store import Piece

_flash = private_op("_scaled_dot_product_flash_attention_for_cpu.default", "the fused kernel on CPUs")

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
    G = pieces[0].k_PGSD.shape[1]
    dtype = accumulate_dtype(q_nHD.dtype)
    q_GLD = (q_nHD.to(dtype) * scale).view(n, G, H // G, D).permute(1, 2, 0, 3).reshape(G, -1, D)
    fused = q_nHD.device.type == "cpu" and softcap is None and pieces[0].v_PGSE.shape[-1] == D
    rows = 1 if fused and n == 1 else q_GLD.shape[1]  # the fused kernel keeps no scores
    outs, lses = [], []
    for piece in pieces:
        for index, k, v in _tiles(piece, rows, dtype):
            seen = visible(index, k.shape[0] * k.shape[2])
            k, v = k.to(dtype), v.to(dtype)
            if fused and seen is None:
                out, lse = _attend_fused(q_GLD, k, v)
            else:
                out, lse = _attend_tile(q_GLD, k, v, seen, softcap)
            outs.append(out)
            lses.append(lse)
    out, lse = (torch.cat(parts) if len(parts) > 1 else parts[0] for parts in (outs, lses))
    out, lse = (out[0], lse[0]) if len(out) == 1 else merge_stacked(out, lse)
    out = out.view(G, H // G, n, -1).permute(2, 0, 1, 3).reshape(n, H, -1)
    return out, lse.view(G, H // G, n).permute(2, 0, 1).reshape(n, H)


def _tiles(piece: Piece, rows: int, dtype: torch.dtype):
    """The piece in tiles of whole pages that bound the memory of a product."""
    _, k, v = piece
    P, G, S, D = k.shape
    most = max(1, _SCORES // (G * S * rows))
    if k.dtype != dtype:
        most = max(1, min(most, _UPCAST // (G * S * D)))
    for start in range(0, P, most):
        yield piece.first + start * S, k[start : start + most], v[start : start + most]


def _attend_fused(q_GLD: Tensor, k_PGSD: Tensor, v_PGSE: Tensor) -> tuple[Tensor, Tensor]:
    """(P, G, L, E) and (P, G, L): of each page. No page is empty, and each query sees all of it."""
    return _flash(q_GLD.expand(len(k_PGSD), *q_GLD.shape), k_PGSD, v_PGSE, 0.0, False, scale=1.0)


def _attend_tile(
    q_GLD: Tensor, k_PGSD: Tensor, v_PGSE: Tensor, seen_nK: Tensor | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """(1, G, L, E) and (1, G, L): of all pages together."""
    P, G, S, D = k_PGSD.shape
    L = q_GLD.shape[1]
    q = q_GLD if P == 1 else q_GLD.expand(P, G, L, D).reshape(P * G, L, D)
    s = torch.bmm(q, k_PGSD.flatten(0, 1).mT)
    if softcap is not None:
        s = s.div_(softcap).tanh_().mul_(softcap)
    s = s.view(P, G, L, S)
    if seen_nK is not None:
        n = seen_nK.shape[0]
        hidden = ~seen_nK.view(n, P, 1, 1, S).permute(1, 2, 3, 0, 4)
        s.view(P, G, L // n, n, S).masked_fill_(hidden, -torch.inf)
    highest = s.amax(3).amax(0)
    highest = highest.masked_fill_(highest == -torch.inf, 0.0) if seen_nK is not None else highest
    p = s.sub_(highest.unsqueeze(-1)).exp_()
    total = p.sum(3).sum(0)
    out = torch.bmm(p.view(P * G, L, S), v_PGSE.flatten(0, 1))
    out = out if P == 1 else out.view(P, G, L, -1).sum(0)
    if seen_nK is not None:
        out = out / total.masked_fill(total == 0, 1.0).unsqueeze(-1)
    else:
        out = out.div_(total.unsqueeze(-1))
    return out[None], total.log_().add_(highest)[None]


def merge_stacked(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Partial results over disjoint keys, stacked in the first dim, as one. The same bits for the same input."""
    highest = lses.amax(0)
    highest = highest.masked_fill(highest == -torch.inf, 0.0)
    weights = (lses - highest).exp_()
    total = weights.sum(0)
    out = (outs * weights.unsqueeze(-1)).sum(0) / total.masked_fill(total == 0, 1.0).unsqueeze(-1)
    return out, total.log() + highest
