"""BlockMasks of a cut sequence: one rank's query rows against all keys, made without making the whole.

whole    queries 0..S            x  keys 0..S
cut      this rank's positions   x  keys 0..S       mask_mod(b, h, positions[q_idx], kv_idx)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from longmesh.attention import masks
from longmesh.attention.mask.base import Mask
from longmesh.attention.mods import captured_state
from longmesh.attention.scope.other_keys import OtherKeys

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

_BLOCK = 128


class CutBlockMask(BlockMask):
    """One rank's rows of a BlockMask. `whole` is the mask over the whole sequence, which the engine plans from; `keys`
    are other tokens, if it is to such."""

    whole: Mask
    keys: OtherKeys | None = None


def rewrite_mask_mod(mask_mod: MaskMod, positions: Tensor) -> MaskMod:
    """`mask_mod` for local query indices: row i is the token at `positions[i]` of the whole sequence.

    >>> def causal(b, h, q_idx, kv_idx):
    ...     return kv_idx <= q_idx
    >>> local = rewrite_mask_mod(causal, torch.tensor([6, 7]))  # this rank's rows are tokens 6 and 7
    >>> local(0, 0, torch.tensor(0), torch.tensor([5, 6, 7]))
    tensor([ True,  True, False])
    """

    def of_local_rows(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mask_mod(b, h, positions[q_idx], kv_idx)

    return of_local_rows


def cut_block_mask(
    mask_mod: MaskMod,
    whole: Mask,
    positions: Tensor,
    seq_len: int,
    *,
    B: int | None = None,
    H: int | None = None,
    device: torch.device | str = "cpu",
    block_size: int | tuple[int, int] = _BLOCK,
) -> CutBlockMask:
    """The BlockMask of the query rows at `positions` against all `seq_len` keys."""
    local = rewrite_mask_mod(mask_mod, positions.to(device))
    made = create_block_mask(local, B, H, positions.numel(), seq_len, device=device, BLOCK_SIZE=block_size)
    found = CutBlockMask(**vars(made))
    found.whole = whole
    return found


def create_block_mask_cached(
    mask_mod: MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str = "cpu",
    BLOCK_SIZE: int | tuple[int, int] = _BLOCK,
) -> BlockMask:
    """torch's create_block_mask, made once for the same sizes, device and function: the same object, and what it
    captured as it was.

    >>> def causal(b, h, q_idx, kv_idx):
    ...     return kv_idx <= q_idx
    >>> first = create_block_mask_cached(causal, None, None, 256, 256)
    >>> first is create_block_mask_cached(causal, None, None, 256, 256)
    True
    """
    return _create_block_mask(mask_mod, captured_state(mask_mod), B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE)


@functools.lru_cache(maxsize=64)
def _create_block_mask(mask_mod: MaskMod, state: str, *sizes_and_device: Any) -> BlockMask:
    return create_block_mask(mask_mod, *sizes_and_device)


def mask_of(block_mask: BlockMask, first: tuple[int, int], rows: int) -> Mask:
    """The mask of a BlockMask for `rows` batch rows, from the row and head `first` on."""
    if isinstance(block_mask, CutBlockMask):
        return block_mask.whole
    batch, heads = block_mask.kv_num_blocks.shape[:2]
    if (batch, heads) == (1, 1) or (first == (0, 0) and batch in (1, rows)):
        return masks.from_block_mask(block_mask)
    (row, head), own = first, block_mask.mask_mod
    return masks.mask_mod(
        lambda b, h, q_idx, kv_idx: own(b + row, h + head, q_idx, kv_idx), rows=rows if batch > 1 else 1
    )
