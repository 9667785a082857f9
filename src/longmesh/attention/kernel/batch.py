"""Reading and writing the tiles of one batched call: rows of a buffer as (tiles, heads, rows, dim).

Shapes: N tiles of the call, X heads with the batch folded in (batch row major), S rows of the
buffer, L rows of a tile, D head dim.

One tile is a slice, tiles at a constant step are a strided view (overlapping where a window's keys
overlap), anything else is a zero-padded copy. Writing goes tile by tile through slices: that costs
a third of index_add_ here, and overlapping tiles add up correctly, which a strided `add_` would not.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from longmesh.attention.kernel.merge import merge_


def fold_heads(tensor_BHSD: Tensor) -> Tensor:
    """(B, H, S, D) as (B * H, S, D) with unit stride in D: a view wherever the strides allow one."""
    folded = tensor_BHSD.flatten(0, 1)
    return folded if folded.stride(-1) == 1 or folded.shape[-1] == 1 else folded.contiguous()


def fold_view(tensor_BHSD: Tensor) -> Tensor:
    """(B, H, S, ...) as (B * H, S, ...), to be written through: never a copy."""
    B, H, *rest = tensor_BHSD.shape
    return tensor_BHSD.view(B * H, *rest)


def constant_step(starts: tuple[int, ...]) -> int | None:
    """The distance between neighbours if it is the same positive one for all, else None."""
    step = starts[1] - starts[0]
    if step > 0 and all(b - a == step for a, b in pairwise(starts)):
        return step
    return None


def read_tiles(buffer_XSD: Tensor, starts: tuple[int, ...], length: int, sizes: list[int] | None) -> Tensor:
    """The tiles as (N, X, L, ...): a view if possible. `sizes` given: shorter tiles, padded with zeros."""
    if len(starts) == 1:
        return buffer_XSD[:, starts[0] : starts[0] + length].unsqueeze(0)
    step = constant_step(starts) if sizes is None else None
    stride = buffer_XSD.stride()
    if step is not None:
        shape = (len(starts), buffer_XSD.shape[0], length, *buffer_XSD.shape[2:])
        offset = buffer_XSD.storage_offset() + starts[0] * stride[1]
        return buffer_XSD.as_strided(shape, (step * stride[1], stride[0], *stride[1:]), offset)
    copy = buffer_XSD.new_zeros((len(starts), buffer_XSD.shape[0], length, *buffer_XSD.shape[2:]))
    for index, start in enumerate(starts):
        size = length if sizes is None else sizes[index]
        copy[index, :, :size] = buffer_XSD[:, start : start + size]
    return copy


def _tiles(
    tiles_NXL: Tensor, starts: tuple[int, ...], sizes: list[int] | None
) -> Iterator[tuple[slice, Tensor]]:
    """Pairs of (rows of the buffer, their (X, rows, ...) values); one pair if the rows are adjacent."""
    length = tiles_NXL.shape[2]
    if sizes is None and (len(starts) == 1 or constant_step(starts) == length):
        rows = slice(starts[0], starts[0] + length * len(starts))
        yield rows, tiles_NXL[0] if len(starts) == 1 else tiles_NXL.transpose(0, 1).flatten(1, 2)
        return
    for index, start in enumerate(starts):
        size = length if sizes is None else sizes[index]
        yield slice(start, start + size), tiles_NXL[index, :, :size]


def add_tiles_(
    buffer_XSD: Tensor, tiles_NXLD: Tensor, starts: tuple[int, ...], sizes: list[int] | None
) -> None:
    """Adds the tiles to their rows."""
    for rows, values in _tiles(tiles_NXLD, starts, sizes):
        buffer_XSD[:, rows].add_(values)


def merge_tiles_(
    out_XSD: Tensor,
    lse_XS: Tensor,
    tile_out_NXLD: Tensor,
    tile_lse_NXL: Tensor,
    starts: tuple[int, ...],
    sizes: list[int] | None,
    first: bool,
) -> None:
    """Merges the tiles' results into their rows, or just writes them if `first` (nothing there yet)."""
    pairs = zip(_tiles(tile_out_NXLD, starts, sizes), _tiles(tile_lse_NXL, starts, sizes), strict=True)
    for (rows, out), (_, lse) in pairs:
        if first:
            out_XSD[:, rows] = out
            lse_XS[:, rows] = lse
        else:
            merge_(out_XSD[:, rows], lse_XS[:, rows], out, lse)


def band_mask(
    rows: int, keys: int, lo: int, hi: int, sizes: list[int] | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The additive mask (0 or -inf) of a band, (1 or N, 1, rows, keys); `sizes`: the keys each tile has.

    Only the columns that an edge crosses are computed: the rest is a fill, 50 times cheaper an element.
    """
    mask = torch.zeros((rows, keys), dtype=dtype, device=device)
    row = torch.arange(rows, device=device, dtype=torch.int32)[:, None]
    left, right = min(keys, max(0, rows - 1 + lo)), min(keys, max(0, hi + 1))
    if left > 0:  # keys before `left` are hidden from some rows
        column = torch.arange(left, device=device, dtype=torch.int32)
        mask[:, :left].masked_fill_(column < row + lo, -torch.inf)
    if right < keys:  # so are those from `right` on
        column = torch.arange(right, keys, device=device, dtype=torch.int32)
        mask[:, right:].masked_fill_(column > row + hi, -torch.inf)
    if sizes is None:
        return mask[None, None]
    missing = torch.arange(keys, device=device) >= _on_device(tuple(sizes), device)[:, None, None, None]
    return torch.where(missing, -torch.inf, mask)


@lru_cache(maxsize=256)
def _on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """The numbers as a tensor, copied to the device once."""
    return torch.tensor(numbers).to(device)
