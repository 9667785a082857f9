"""Attention tensors as rows: what travels is tokens, so a token's heads lie together in memory.

Shapes: B batch, H heads, S tokens, D head dim; a row of (B, H, D) and (B, G, E) side by side is W wide.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from longmesh.attention.execute.route import Where


def to_rows(*tensors_BHSD: Tensor) -> Tensor:
    """(S, W): the tensors' tokens as rows, side by side. Always a copy, and only one."""
    first = tensors_BHSD[0]
    rows_SW = first.new_empty((first.shape[2], sum(width_of(t) for t in tensors_BHSD)))
    for part, tensor in zip(from_rows(rows_SW, *tensors_BHSD), tensors_BHSD, strict=True):
        part.copy_(tensor)
    return rows_SW


def width_of(tensor_BHSD: Tensor) -> int:
    return math.prod(size for dim, size in enumerate(tensor_BHSD.shape) if dim != 2)


def from_rows(rows_SW: Tensor, *like_BHSD: Tensor) -> list[Tensor]:
    """Views of the rows as tensors shaped like those given, but for the number of tokens."""
    views, at = [], 0
    for like in like_BHSD:
        B, H, _, *rest = like.shape
        part = rows_SW[:, at : at + width_of(like)].unflatten(1, (B, H, *rest))
        views.append(part.permute(1, 2, 0, *range(3, part.ndim)))
        at += width_of(like)
    return views


def take_rows(rows: Tensor, where: Where) -> Tensor:
    return rows[where] if isinstance(where, slice) else rows.index_select(0, where)


def place_rows(received: Tensor, where: Where) -> Tensor:
    """The destination that `where` fills completely."""
    if isinstance(where, slice):
        return received
    return torch.empty_like(received).index_copy_(0, where, received)


def add_rows_(total: Tensor, where: Where, rows: Tensor) -> None:
    """Adds rows where they belong; a place may occur more than once."""
    if isinstance(where, slice):
        total[where].add_(rows)
    else:
        total.index_add_(0, where, rows)
