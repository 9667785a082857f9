"""The memory of one layer's pages on this rank.

Shapes: P pages, G key heads, S tokens of a page, D head dim of keys, E of values.

    slab (P, G, S * D + S * E):  of a page and head first all keys, then all values

Within a page and head, keys lie in a row, as matrix products want them; pages in a row lie in a row, so a run of pages
is one block to read, and one to send, with nothing copied. Memory is taken in slabs: one when the pool is made, more
only if it grows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longmesh.cache.placement import Span
from longmesh.cache.plan import Write
from longmesh.cache.sequence import GONE

_SPANS = 8  # more writes than these are one indexed write


class Piece(NamedTuple):
    """Keys and values of local tokens from `first` on: all of some pages in a row, or a part of one page."""

    first: int
    k_PGSD: Tensor
    v_PGSE: Tensor

    @property
    def num_tokens(self) -> int:
        return self.k_PGSD.shape[0] * self.k_PGSD.shape[2]


class Shape(NamedTuple):
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

    def __init__(self, shape: Shape, page: int, device: torch.device | str) -> None:
        self.shape, self.page, self.device = shape, page, device
        self.kv_heads, self.head_dim, self.v_head_dim, self.dtype = shape
        self._starts: list[int] = []
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self.slabs: list[Tensor] = []
        self.num_pages = 0

    @property
    def num_bytes(self) -> int:
        return sum(slab.numel() * slab.element_size() for slab in self.slabs)

    @torch.inference_mode(False)  # what is made there can be written only there
    def grow(self, num_pages: int) -> None:
        """Take memory for more pages."""
        if num_pages <= 0:
            return
        split = self.page * self.head_dim
        width = split + self.page * self.v_head_dim
        slab = torch.zeros((num_pages, self.kv_heads, width), dtype=self.dtype, device=self.device)
        self.slabs.append(slab)
        self._keys.append(slab[..., :split].unflatten(-1, (self.page, self.head_dim)))
        self._values.append(slab[..., split:].unflatten(-1, (self.page, self.v_head_dim)))
        self._starts.append(self.num_pages)
        self.num_pages += num_pages

    def page_row(self, page: int) -> Tensor:
        """(G, S * D + S * E): a page's memory."""
        slab, start = self._slab(page)
        return self.slabs[slab][page - start]

    def run(self, page: int, count: int) -> Iterable[tuple[Tensor, Tensor]]:
        """Keys and values of pages in a row, cut where slabs end."""
        while count:
            slab, start = self._slab(page)
            take = min(count, len(self.slabs[slab]) - (page - start))
            at = slice(page - start, page - start + take)
            yield self._keys[slab][at], self._values[slab][at]
            page, count = page + take, count - take

    def pieces(self, runs: Sequence[tuple[int, int]], spans: Sequence[Span]) -> list[Piece]:
        """The local tokens of `spans`, of a table whose pages are `runs`."""
        found: list[Piece] = []
        for start, stop in spans:
            index = 0  # of the run's first token
            for first, count in runs:
                low, high = max(start, index), min(stop, index + count * self.page)
                if low < high and first == GONE:
                    found.append(self._nothing(low, high - low))
                elif low < high:
                    self._cut(first, low - index, high - index, low, found)
                index += count * self.page
                if index >= stop:
                    break
        return found

    def _nothing(self, first: int, count: int) -> Piece:
        """Zeros for tokens whose pages were given back, since no query sees them."""
        zero = torch.zeros((), dtype=self.dtype, device=self.device)
        k, v = (zero.expand(1, self.kv_heads, count, width) for width in (self.head_dim, self.v_head_dim))
        return Piece(first, k, v)

    def _cut(self, page: int, low: int, high: int, index: int, found: list[Piece]) -> None:
        """Tokens [low, high) of pages in a row from `page` on: part of a page, whole pages, part of a page."""
        while low < high:
            number, offset = divmod(low, self.page)
            whole = (high - low) // self.page if offset == 0 else 0
            if whole:
                for k, v in self.run(page + number, whole):
                    found.append(Piece(index, k, v))
                    index += len(k) * self.page
                low += whole * self.page
                continue
            take = min(self.page - offset, high - low)
            (k, v), *_ = self.run(page + number, 1)
            found.append(Piece(index, k[:, :, offset : offset + take], v[:, :, offset : offset + take]))
            low, index = low + take, index + take

    @torch.no_grad()
    def write(self, writes: Sequence[Write], k_TGD: Tensor, v_TGE: Tensor) -> None:
        """Put rows of new tokens into their pages."""
        if len(writes) > _SPANS:
            self._write_many(writes, k_TGD, v_TGE)
            return
        for row, count, page, offset in writes:
            slab, start = self._slab(page)
            at, rows = slice(offset, offset + count), slice(row, row + count)
            self._keys[slab][page - start, :, at] = k_TGD[rows].transpose(0, 1)
            self._values[slab][page - start, :, at] = v_TGE[rows].transpose(0, 1)

    def _write_many(self, writes: Sequence[Write], k_TGD: Tensor, v_TGE: Tensor) -> None:
        for slab, start in enumerate(self._starts):
            stop = start + len(self.slabs[slab])
            mine = [w for w in writes if start <= w.page < stop]
            if not mine:
                continue
            rows, pages, offsets = zip(
                *(
                    (w.row + i, w.page - start, w.offset + i)
                    for w in mine
                    for i in range(w.num_tokens)
                ),
                strict=True,
            )  # fmt: skip
            r, p, o = (torch.tensor(numbers, device=k_TGD.device) for numbers in (rows, pages, offsets))
            self._keys[slab].transpose(1, 2)[p, o] = k_TGD[r].to(self.dtype)
            self._values[slab].transpose(1, 2)[p, o] = v_TGE[r].to(self.dtype)

    @torch.no_grad()
    def copy(self, source: int, target: int) -> None:
        self.page_row(target).copy_(self.page_row(source))

    def _slab(self, page: int) -> tuple[int, int]:
        at = bisect_right(self._starts, page) - 1
        return at, self._starts[at]
