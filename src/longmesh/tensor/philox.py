"""Random bits by address: Philox-4x64-10 as a pure function of (seed, op counter, global element index).

    block b  =  Philox(key = (seed, op counter), counter = b)  ->  4 words of 64 bits
    element i of a tensor takes its 32 bits (or 64) from block i // 8 (or i // 4)

`i` counts the global tensor row by row, so a rank makes the bits of its own part alone and every layout
gives the same whole. A part is a number of equally long runs of consecutive elements. On the CPU numpy's
Philox makes long runs; short ones, and other devices, take the same algorithm in int64 torch ops.

The pitfall: whole blocks are converted to values, also at the ends of a run, so that an element goes through
the same vector instructions whoever makes it; only then is the run cut to size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

Key = tuple[int, int]
"""Seed and op counter, both taken modulo 2**64."""

Convert = Callable[[torch.Tensor], torch.Tensor]
"""Bits (1-d int32 or int64, whole blocks) to as many values. Pairs of neighbours may be mixed, no others."""

_M0, _M1 = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_W0, _W1 = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
_LOW = 0xFFFFFFFF
_WORDS = 4
_SHORT_RUN = 256
# Blocks made at a time: what stays in a core's cache, or keeps a device busy.
_CHUNK_BLOCKS = {"cpu": 1 << 12}
_DEFAULT_CHUNK_BLOCKS = 1 << 19
# Up to how many blocks are made for one that is needed.
_NEAR = 16
# Conversions run on multiples of this many blocks: no vector loop leaves a scalar rest.
_PAD_BLOCKS = 8


@dataclass(frozen=True, slots=True)
class Region:
    """A box of a global tensor: what one rank holds."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.lengths)

    @property
    def run_dim(self) -> int:
        """The last dim that is sharded: from it on elements lie one after the other; -1 if none is."""
        return max((d for d, n in enumerate(self.shape) if self.lengths[d] != n), default=-1)

    @property
    def run_length(self) -> int:
        return math.prod(self.lengths[max(self.run_dim, 0) :])

    def starts(self) -> np.ndarray:
        """The global index of each run's first element, in order."""
        starts = np.zeros(1, dtype=np.int64)
        for dim in range(self.run_dim + 1):
            stride = math.prod(self.shape[dim + 1 :])
            count = self.lengths[dim] if dim < self.run_dim else 1
            places = (self.offset[dim] + np.arange(count, dtype=np.int64)) * stride
            starts = (starts[:, None] + places).reshape(-1)
        return starts


def generate(region: Region, key: Key, bits: int, convert: Convert, out: torch.Tensor) -> None:
    """Write `convert` of the region's bits (`bits` = 32 or 64 per element) to `out`, dense and of its shape."""
    if region.numel == 0:
        return
    flat = out.view(-1)
    length = region.run_length
    starts = region.starts()
    chunk = _CHUNK_BLOCKS.get(out.device.type, _DEFAULT_CHUNK_BLOCKS)
    if out.device.type == "cpu" and (length >= _SHORT_RUN or len(starts) == 1):
        for row, start in enumerate(starts.tolist()):
            _long_run(start, key, bits, convert, flat[row * length : (row + 1) * length], chunk)
    else:
        _short_runs(torch.from_numpy(starts).to(out.device), length, key, bits, convert, flat, chunk)


def _long_run(start: int, key: Key, bits: int, convert: Convert, out: torch.Tensor, chunk: int) -> None:
    per_block = 64 * _WORDS // bits
    first, skipped = divmod(start, per_block)
    stop = -(-(start + out.numel()) // per_block)
    done = 0
    for words in _numpy_words(first, stop - first, key, chunk):
        values = convert(torch.from_numpy(words.view(np.int32 if bits == 32 else np.int64)))
        piece = values[skipped : skipped + out.numel() - done]
        out[done : done + piece.numel()] = piece
        done += piece.numel()
        skipped = 0


def _numpy_words(first: int, count: int, key: Key, chunk: int) -> Iterator[np.ndarray]:
    """The words of `count` blocks from block `first` on, a chunk at a time, each padded to whole pads."""
    # numpy increments its counter before it makes a block.
    key_words = np.array([key[0] % 2**64, key[1] % 2**64], dtype=np.uint64)
    source = np.random.Philox(key=key_words, counter=(first - 1) % 2**256)
    for begin in range(0, count, chunk):
        blocks = min(chunk, count - begin)
        yield source.random_raw(_padded(blocks) * _WORDS)


def _padded(blocks: int) -> int:
    return -(-blocks // _PAD_BLOCKS) * _PAD_BLOCKS


def _short_runs(
    starts: torch.Tensor, length: int, key: Key, bits: int, convert: Convert, out: torch.Tensor, chunk: int
) -> None:
    """Many runs at once: each is covered by the blocks it may touch, wherever in a block it starts."""
    per_block = 64 * _WORDS // bits
    per_run = (length + 2 * per_block - 2) // per_block
    places = torch.arange(length, device=out.device)
    row = torch.arange(per_run, device=out.device)
    step = max(1, chunk // per_run)
    rows_out = out.view(-1, length)
    for begin in range(0, starts.numel(), step):
        start = starts[begin : begin + step, None]
        blocks = (torch.div(start, per_block, rounding_mode="floor") + row).view(-1)
        count = blocks.numel()
        blocks = torch.cat((blocks, blocks[-1:].expand(_padded(count) - count)))
        words = _words_of(blocks, key)
        values = convert(words.view(-1).view(torch.int32 if bits == 32 else torch.int64))
        values = values[: count * per_block].view(start.numel(), -1)
        rows_out[begin : begin + step] = values.gather(1, start % per_block + places)


def _words_of(blocks: torch.Tensor, key: Key) -> torch.Tensor:
    """The words of blocks in rising order. Where they lie close together on the CPU, numpy makes those between
    them too: a block costs it far less than torch."""
    if blocks.device.type == "cpu":
        first, last = int(blocks[0]), int(blocks[-1])
        if last - first < _NEAR * blocks.numel():
            (words,) = _numpy_words(first, last - first + 1, key, last - first + 1)
            return torch.from_numpy(words.view(np.int64)).view(-1, _WORDS)[blocks - first]
    return philox_words(blocks, key)


def philox_words(blocks: torch.Tensor, key: Key) -> torch.Tensor:
    """The 4 words of each block, in a new last dim: Philox-4x64-10 with int64 as unsigned words."""
    c0, c1, c2, c3 = blocks, torch.zeros_like(blocks), torch.zeros_like(blocks), torch.zeros_like(blocks)
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply(c0, _M0)
        high1, low1 = _multiply(c2, _M1)
        c0 = high1.bitwise_xor_(c1).bitwise_xor_(_signed(k0))
        c2 = high0.bitwise_xor_(c3).bitwise_xor_(_signed(k1))
        c1, c3 = low1, low0
        k0, k1 = k0 + _W0, k1 + _W1
    return torch.stack((c0, c1, c2, c3), dim=-1)


def _multiply(a: torch.Tensor, by: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 64 bits of an unsigned product. Partial products wrap; shifts are masked to be logical."""
    by_low, by_high = by & _LOW, by >> 32
    a_low, a_high = a & _LOW, (a >> 32).bitwise_and_(_LOW)
    middle = (a_low * by_low).bitwise_right_shift_(32).bitwise_and_(_LOW).add_(a_high * by_low)
    carry = a_low.mul_(by_high).add_(middle & _LOW).bitwise_right_shift_(32).bitwise_and_(_LOW)
    high = a_high.mul_(by_high).add_(middle.bitwise_right_shift_(32).bitwise_and_(_LOW)).add_(carry)
    return high, a * _signed(by)


def _signed(word: int) -> int:
    return (word + 2**63) % 2**64 - 2**63
