"""Dropout that depends on what is dropped and not on who computes it.

Shapes: B batch, H heads, L and M rows and keys of a tile.

Whether a pair survives is a hash of (seed, batch row, head, global query index, global key index): the
same on every layout, rank count and block size, and again in the backward, with nothing stored. Row
and column keys are hashed separately and thoroughly, then only one mixing round runs per pair.

The pitfall: torch has no unsigned 64-bit arithmetic on every device; products wrap as int64, and the
arithmetic right shift must be masked to be a logical one.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MIX_1 = 0xFF51AFD7ED558CCD - (1 << 64)
_MIX_2 = 0xC4CEB9FE1A85EC53 - (1 << 64)
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)


def _mix(x: Tensor) -> Tensor:
    """A bijective 64-bit finaliser in which every input bit reaches every output bit."""
    x = x ^ ((x >> 33) & 0x7FFFFFFF)
    x = x.mul_(_MIX_1)
    x ^= (x >> 33).bitwise_and_(0x7FFFFFFF)
    x = x.mul_(_MIX_2)
    x ^= (x >> 33).bitwise_and_(0x7FFFFFFF)
    return x


def kept(seed: int, p: float, at: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """Which pairs survive dropout with probability `p` of being dropped: bool (B, H, L, M)."""
    b_B, h_H, q_L, k_M = (index.to(torch.int64) for index in at)
    signed_seed = (seed + (1 << 63)) % (1 << 64) - (1 << 63)
    start = _mix(torch.full((1,), signed_seed, dtype=torch.int64, device=q_L.device).add_(_GOLDEN))
    row = _mix(_mix(_mix(start + b_B)[:, None] + h_H)[..., None] + q_L)
    column = _mix(_mix(k_M + _GOLDEN) ^ start)
    bits = _mix(row[..., None] + column)
    return ((bits >> 32) & 0xFFFFFFFF) >= round(p * (1 << 32))
