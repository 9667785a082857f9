"""Functions of global indices: score_mod, mask_mod, and a bias, evaluated on one tile.

Shapes: B batch, H query heads, X both folded, L and M rows and keys of a tile.

Indices are global, whatever the layout; how a function of a pair is asked for a whole tile is in `mods`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longmesh.attention.kernel.base import Coordinates, Score
from longmesh.attention.kernel.lower import KernelCall
from longmesh.attention.mods import apply_mask_mod


def indices(
    call_rows: tuple[int, int], call_keys: tuple[int, int], heads: tuple[int, int], where: Coordinates,
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Global batch, head, row and key indices of a tile."""
    B, H = heads
    b_B = torch.arange(where.batch_start, where.batch_start + B, device=device)
    h_H = torch.arange(where.head_start, where.head_start + H, device=device)
    return b_B, h_H, where.q_rows(*call_rows, device), where.k_rows(*call_keys, device)


def bias_tile(bias: Tensor, at: tuple[Tensor, ...]) -> Tensor:
    """The bias of a tile, (B or 1, H or 1, L or 1, M or 1)."""
    bias = bias[(None,) * (4 - bias.ndim)]
    for dim, index in enumerate(at):
        if bias.shape[dim] != 1:
            rows = _span(index)
            bias = bias.index_select(dim, index) if rows is None else bias[(slice(None),) * dim + (rows,)]
    return bias


def _span(index: Tensor) -> slice | None:
    """The indices as a slice, if they are adjacent. Not on a device: the host would wait for it to look at them."""
    if index.device.type != "cpu" or index.numel() == 0:
        return None
    first, last = int(index[0]), int(index[-1])
    if last - first != index.numel() - 1 or not bool((index.diff() == 1).all()):
        return None
    return slice(first, last + 1)


def add_bias_gradient_(dbias: Tensor, dscore_BHLM: Tensor, at: tuple[Tensor, ...]) -> None:
    """Adds a tile's score gradient to the rows and columns of the bias it came from."""
    dbias = dbias.view((1,) * (4 - dbias.ndim) + dbias.shape)
    summed = [dim for dim in range(4) if dbias.shape[dim] == 1]
    dscore = dscore_BHLM.sum(summed, keepdim=True) if summed else dscore_BHLM
    index = [
        torch.zeros(1, dtype=torch.long, device=dbias.device) if dim in summed else at[dim]
        for dim in range(4)
    ]
    b, h, q, k = index
    dbias.index_put_(
        (b[:, None, None, None], h[:, None, None], q[:, None], k), dscore.to(dbias.dtype), accumulate=True
    )


def visible(
    lo: int, hi: int, elementwise: bool, score: Score, at: tuple[Tensor, ...], rows: int, keys: int
) -> Tensor | None:
    """Which pairs of a tile exist, as bool broadcastable to (B, H, L, M); None for all of them."""
    device = at[2].device
    seen = None
    if lo > -rows or hi < keys:
        offset = torch.arange(keys, device=device) - torch.arange(rows, device=device)[:, None]
        seen = ((offset >= lo) & (offset <= hi))[None, None]
    if elementwise and score.mask_mod is not None:
        asked = apply_mask_mod(score.mask_mod, at)
        seen = asked if seen is None else seen & asked
    return seen


def additive_mask(
    call: KernelCall, score: Score, where: Coordinates, heads: tuple[int, int], like: Tensor
) -> Tensor:
    """Band, mask_mod and bias of a one-tile call as one additive mask (1, X or 1, L, M)."""
    (q,), (k,) = call.q_starts, call.k_starts
    at = indices((q, q + call.rows), (k, k + call.keys), heads, where, like.device)
    seen = visible(call.lo, call.hi, call.elementwise, score, at, call.rows, call.keys)
    mask = torch.zeros((1, 1, call.rows, call.keys), dtype=like.dtype, device=like.device)
    if score.bias is not None:
        mask = mask + bias_tile(score.bias.detach(), at).to(like.dtype)
    if seen is not None:
        mask = torch.where(seen, mask, -torch.inf)
    if mask.shape[0] == 1 and mask.shape[1] == 1:
        return mask
    return mask.expand(*heads, -1, -1).reshape(1, -1, call.rows, call.keys)
