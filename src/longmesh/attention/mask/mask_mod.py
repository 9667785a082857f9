"""Masks that are a function or a table of blocks: FlexAttention's `mask_mod` and `BlockMask`.

The function is asked for every pair once, in strips of queries, and each block of the sequence
becomes one of

    empty    never computed, never sent
    full     a plain slice
    partial  an elementwise slice: the kernel asks the function again, at global positions

Pitfall: the function is vmapped, as FlexAttention does, so it must be made of torch operators; a block is full
or empty only if it is so for every head.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch

from longmesh.attention.mask.base import Mask
from longmesh.attention.mask.slices import COLUMNS, EW, HI, K0, K1, LO, Q0, Q1, UNBOUNDED, make_slices
from longmesh.attention.mods import apply_mask_mod, captured_state
from longmesh.errors import LongmeshError, whole_number

_EMPTY, _PARTIAL, _FULL = 0, 1, 2
_PAIRS_AT_ONCE = 1 << 21


@dataclasses.dataclass(frozen=True)
class MaskMod(Mask):
    """`state` tells apart what the function captured when it was last looked at: plans are kept for equal masks."""

    fn: Callable
    block: int = 128
    rows: int = 1
    state: str = ""

    @property
    def num_rows(self) -> int:
        return self.rows

    def slices(self, seq_len: int, *, row: int = 0, num_heads: int = 1) -> np.ndarray:
        return self.slices_between(0, seq_len, seq_len, row=row, num_heads=num_heads)

    def slices_between(
        self, start: int, stop: int, kv_len: int, *, row: int = 0, num_heads: int = 1
    ) -> np.ndarray:
        if start < 0:
            raise LongmeshError(
                f"{self}: of {stop - start} queries the first would stand at position {start}, before the {kv_len} "
                "keys; give q_offset=0 if the function numbers queries from 0"
            )
        if stop <= start or kv_len == 0:
            return make_slices()
        step = self.block * max(1, _PAIRS_AT_ONCE // (self.block * kv_len * num_heads))
        strips = [(q, min(q + step, stop)) for q in range(start, stop, step)]
        kinds = [_classify(self, strip, kv_len, row, num_heads) for strip in strips]
        return slices_of_blocks(np.concatenate(kinds), self.block, self.block, (start, stop), kv_len)

    def current(self) -> Mask:
        state = captured_state(self.fn)
        return self if state == self.state else dataclasses.replace(self, state=state)

    def visible(self, b, h, q_idx, kv_idx):
        return self.fn(b, h, q_idx, kv_idx)

    def __str__(self) -> str:
        return f"mask_mod({getattr(self.fn, '__name__', self.fn)})"


def _classify(mask: MaskMod, strip: tuple[int, int], kv_len: int, row: int, num_heads: int) -> np.ndarray:
    """Empty, partial or full for each block of a strip of queries that begins with a block: (blocks, blocks)."""
    at = (torch.tensor([row]), torch.arange(num_heads), torch.arange(*strip), torch.arange(kv_len))
    try:
        seen_BHLM = apply_mask_mod(mask.fn, at)
    except ValueError as error:  # vmap's, of a result that is not a tensor
        raise LongmeshError(f"{mask}: a mask_mod returns a boolean tensor; {error}") from error
    if seen_BHLM.dtype != torch.bool:
        raise LongmeshError(f"{mask} returned {seen_BHLM.dtype}; a mask_mod returns a boolean tensor")
    rows, keys = np.arange(0, strip[1] - strip[0], mask.block), np.arange(0, kv_len, mask.block)
    seen_XLM = seen_BHLM.flatten(0, 1)
    some = np.logical_or.reduceat(seen_XLM.any(dim=0).numpy(), keys, axis=1)
    every = np.logical_and.reduceat(seen_XLM.all(dim=0).numpy(), keys, axis=1)
    some, every = np.logical_or.reduceat(some, rows), np.logical_and.reduceat(every, rows)
    return some.astype(np.int8) + every.astype(np.int8)


def slices_of_blocks(
    kinds: np.ndarray, q_block: int, k_block: int, queries: tuple[int, int], kv_len: int
) -> np.ndarray:
    """Slices of a table of block kinds; neighbours of one kind in a strip are one slice."""
    padded = np.pad(kinds, ((0, 0), (1, 1)))
    strip, edge = np.nonzero(padded[:, 1:] != padded[:, :-1])
    kind = padded[strip, edge + 1]
    stop = np.append(edge[1:], 0)
    keep = kind != _EMPTY
    out = np.zeros((int(keep.sum()), COLUMNS), dtype=np.int64)
    out[:, Q0] = queries[0] + strip[keep] * q_block
    out[:, Q1] = np.minimum(out[:, Q0] + q_block, queries[1])
    out[:, K0] = edge[keep] * k_block
    out[:, K1] = np.minimum(stop[keep] * k_block, kv_len)
    out[:, LO], out[:, HI] = -UNBOUNDED, UNBOUNDED
    out[:, EW] = kind[keep] == _PARTIAL
    return out


def mask_mod(fn: Callable, *, block: int = 128, rows: int = 1) -> Mask:
    """The mask `fn(b, h, q_idx, kv_idx) -> bool` of global indices; `rows` > 1 if it depends on `b`.

    >>> def same_parity(b, h, q_idx, kv_idx):
    ...     return (q_idx - kv_idx) % 2 == 0
    >>> i, j = torch.arange(4)[:, None], torch.arange(4)
    >>> masks.mask_mod(same_parity).visible(0, 0, i, j).long()
    tensor([[1, 0, 1, 0],
            [0, 1, 0, 1],
            [1, 0, 1, 0],
            [0, 1, 0, 1]])
    """
    if not callable(fn):
        raise LongmeshError(f"mask_mod({fn!r}): give a function of (b, h, q_idx, kv_idx)")
    block, rows = whole_number("mask_mod(block=)", block), whole_number("mask_mod(rows=)", rows)
    if block < 1 or rows < 1:
        raise LongmeshError(f"mask_mod(block={block}, rows={rows}): both must be at least 1")
    return MaskMod(fn, block, rows, captured_state(fn))


@dataclasses.dataclass(frozen=True)
class BlockTable(Mask):
    """A FlexAttention BlockMask: its table of blocks and the function inside partial ones."""

    fn: Callable
    q_block: int
    k_block: int
    kinds: tuple[bytes, ...]  # for each batch row, a table of block kinds
    shape: tuple[int, int]  # of that table
    seq_lens: tuple[int, int]

    @property
    def num_rows(self) -> int:
        return len(self.kinds)

    @property
    def numbers_queries(self) -> Literal["all"]:
        return "all"

    def slices(self, seq_len: int, *, row: int = 0, num_heads: int = 1) -> np.ndarray:
        return self.slices_between(0, seq_len, seq_len, row=row, num_heads=num_heads)

    def slices_between(
        self, start: int, stop: int, kv_len: int, *, row: int = 0, num_heads: int = 1
    ) -> np.ndarray:
        if (start, self.seq_lens) != (0, (stop, kv_len)):
            given = f"{stop} tokens" if stop == kv_len else f"{stop - start} queries and {kv_len} keys"
            raise LongmeshError(
                f"the BlockMask is for {self.seq_lens[0]} queries and {self.seq_lens[1]} keys, "
                f"the sequence has {given}; "
                f"make it with create_block_mask(..., Q_LEN={stop - start}, KV_LEN={kv_len})"
            )
        kinds = np.frombuffer(self.kinds[row], dtype=np.int8).reshape(self.shape)
        return slices_of_blocks(kinds, self.q_block, self.k_block, (start, stop), kv_len)

    def visible(self, b, h, q_idx, kv_idx):
        return self.fn(b, h, q_idx, kv_idx)

    def __str__(self) -> str:
        return f"from_block_mask({self.shape[0]} x {self.shape[1]} blocks of {self.q_block} x {self.k_block})"


def from_block_mask(block_mask) -> Mask:
    """The mask of a `torch.nn.attention.flex_attention.BlockMask`, without asking its function again.

    >>> from torch.nn.attention.flex_attention import create_block_mask
    >>> block_mask = create_block_mask(lambda b, h, q, k: k <= q, None, None, 256, 256, device="cpu")
    >>> mask = masks.from_block_mask(block_mask)
    >>> bool(mask.visible(0, 0, torch.tensor(3), torch.tensor(4)))
    False
    """
    shape = tuple(block_mask.kv_indices.shape[-2:])
    partial = _table(block_mask.kv_num_blocks, block_mask.kv_indices)
    full = np.zeros_like(partial)
    if block_mask.full_kv_num_blocks is not None:
        full = _table(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    present = partial | full
    kinds = present.any(axis=1).astype(np.int8) + full.all(axis=1).astype(np.int8)  # over the heads
    q_block, k_block = block_mask.BLOCK_SIZE
    return BlockTable(
        fn=block_mask.mask_mod,
        q_block=int(q_block),
        k_block=int(k_block),
        kinds=tuple(row.tobytes() for row in kinds),
        shape=(int(shape[0]), int(shape[1])),
        seq_lens=(int(block_mask.seq_lengths[0]), int(block_mask.seq_lengths[1])),
    )


def _table(counts: torch.Tensor, indices: torch.Tensor) -> np.ndarray:
    """Booleans (batch, heads, query blocks, key blocks) from counts and lists of key blocks."""
    counts, indices = counts.cpu(), indices.cpu()
    listed = torch.arange(indices.shape[-1]) < counts.unsqueeze(-1)
    table = torch.zeros(indices.shape, dtype=torch.int64)
    table.scatter_add_(-1, indices.long(), listed.long())
    return (table > 0).numpy()
