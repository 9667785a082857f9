"""The memory of one layer's pages on this rank.

Shapes: G key heads, K local tokens, S tokens of a page, D head dim of keys, E of values.

    a slab of P pages: keys (G, P * S, D), values (G, P * S, E)

Pages in a row lie in a row within each head, so that a run of pages is one matrix per head, as products want it, and
is read where it lies. Memory is taken in slabs: one when the pool is made, more only if it grows.

Zeroed memory for pages, in the system's large pages where it has them.

A step reads all keys of a sequence once. With memory pages of 4 KiB much of that time is spent on looking up where
they are; Linux gives large ones (2 MiB) to memory that asks for them.
"""

from __future__ import annotations

import math
import mmap
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longmesh.cache.placement import Span
from longmesh.cache.plan import Write
from longmesh.cache.sequence import GONE

_LARGE = 2 << 20


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A tensor of zeros. On a CPU memory is taken as it is written."""
    num_bytes = math.prod(shape) * dtype.itemsize
    advice = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux has it
    if torch.device(device).type != "cpu" or advice is None or num_bytes < _LARGE:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, num_bytes + _LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(advice)
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the memory as long as it lives
    start = -whole.data_ptr() % _LARGE
    return whole[start : start + num_bytes].view(dtype).view(shape)


_SPANS = 8  # more writes than these, of fewer tokens than these each, are one indexed write


class PageRun(NamedTuple):
    """Keys and values of local tokens from `first` on, which lie in a row."""

    first: int
    k_GKD: Tensor
    v_GKE: Tensor


class PageShape(NamedTuple):
    """What a layer caches of a token."""

    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype

    def page_bytes(self, page: int) -> int:
        """Of a page of so many tokens."""
        return page * self.kv_heads * (self.head_dim + self.v_head_dim) * self.dtype.itemsize


class PageStore:
    """Keys and values of one layer. Rows that were never written are zeros."""

    def __init__(self, shape: PageShape, page: int, device: torch.device | str) -> None:
        self.shape, self.page, self.device = shape, page, device
        self.kv_heads, self.head_dim, self.v_head_dim, self.dtype = shape
        self._starts: list[int] = []  # the first page of each slab
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self.num_pages = 0

    @property
    def num_bytes(self) -> int:
        return sum(slab.numel() * slab.element_size() for slab in (*self._keys, *self._values))

    @torch.inference_mode(False)  # what is made there can be written only there
    def grow(self, num_pages: int) -> None:
        """Take memory for more pages."""
        if num_pages <= 0:
            return
        for slabs, width in ((self._keys, self.head_dim), (self._values, self.v_head_dim)):
            slabs.append(zeros((self.kv_heads, num_pages * self.page, width), self.dtype, self.device))
        self._starts.append(self.num_pages)
        self.num_pages += num_pages

    def parts(self, page: int) -> tuple[Tensor, Tensor]:
        """A page's memory: keys (G, S, D) and values (G, S, E)."""
        slab, at = self._find(page)
        return self._keys[slab][:, at : at + self.page], self._values[slab][:, at : at + self.page]

    def pieces(self, runs: Sequence[tuple[int, int]], spans: Sequence[Span]) -> list[PageRun]:
        """The local tokens of `spans`, of a table whose pages are `runs`: as few pieces as can be."""
        found: list[PageRun] = []
        for start, stop in spans:
            index = 0  # of the run's first token
            for first, count in runs:
                low, high = max(start, index), min(stop, index + count * self.page)
                while low < high:
                    piece = self._piece(first, low, high, low - index)
                    found.append(piece)
                    low += piece.k_GKD.shape[1]
                index += count * self.page
                if index >= stop:
                    break
        return found

    def _piece(self, first: int, low: int, high: int, skipped: int) -> PageRun:
        """Local tokens from `low` to `high`, or to where a slab ends, `skipped` tokens after the page `first`."""
        if first == GONE:
            return self._nothing(low, high - low)
        pages, offset = divmod(skipped, self.page)
        slab, at = self._find(first + pages)
        span = slice(at + offset, at + offset + high - low)
        return PageRun(low, self._keys[slab][:, span], self._values[slab][:, span])

    def _nothing(self, first: int, count: int) -> PageRun:
        """Zeros for tokens whose pages were given back, since no query sees them."""
        zero = torch.zeros((), dtype=self.dtype, device=self.device)
        k, v = (zero.expand(self.kv_heads, count, width) for width in (self.head_dim, self.v_head_dim))
        return PageRun(first, k, v)

    @torch.no_grad()
    def write(self, writes: Sequence[Write], k_TGD: Tensor, v_TGE: Tensor) -> None:
        """Put rows of new tokens into their pages."""
        if len(writes) > _SPANS and sum(w.num_tokens for w in writes) < _SPANS * len(writes):
            self._write_many(writes, k_TGD, v_TGE)
            return
        for row, count, page, offset in writes:
            slab, at = self._find(page)
            span, rows = slice(at + offset, at + offset + count), slice(row, row + count)
            self._keys[slab][:, span] = k_TGD[rows].transpose(0, 1)
            self._values[slab][:, span] = v_TGE[rows].transpose(0, 1)

    def _write_many(self, writes: Sequence[Write], k_TGD: Tensor, v_TGE: Tensor) -> None:
        """Many writes of a few tokens each: one indexed write a slab."""
        of_slab: dict[int, list[tuple[int, int]]] = {}  # row and place of each token
        for row, count, page, offset in writes:
            slab, at = self._find(page)
            of_slab.setdefault(slab, []).extend((row + i, at + offset + i) for i in range(count))
        for slab, pairs in of_slab.items():
            rows, places = (torch.tensor(side, device=k_TGD.device) for side in zip(*pairs, strict=True))
            self._keys[slab][:, places] = k_TGD[rows].transpose(0, 1)
            self._values[slab][:, places] = v_TGE[rows].transpose(0, 1)

    @torch.no_grad()
    def copy(self, source: int, target: int) -> None:
        for new, old in zip(self.parts(target), self.parts(source), strict=True):
            new.copy_(old)

    def _find(self, page: int) -> tuple[int, int]:
        """A page's slab, and the place of its first token there."""
        slab = bisect_right(self._starts, page) - 1
        return slab, (page - self._starts[slab]) * self.page
