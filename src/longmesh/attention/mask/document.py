"""Packed documents: several sequences in one row, none of which sees another.

documents([2, 3])      the mask `within` is applied inside each document, in positions that
# . . . .              start at the document's first token. One list of lengths for every batch
# # . . .              row, or a list of lists, one for each.
. . # . .
. . # # .              `chunked(n)` is the same with documents of n tokens, the last one shorter.
. . # # #

Documents of both sides: document n of the queries sees document n of the keys, and nothing else.

documents([1, 2], kv_lengths=[3, 2])         queries are numbered from 0, and so are keys. Inside a document the queries
# # # . .                                    are the last ones of its keys, for the mask `within`: here causal()
. . . # .
. . . # #
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch

from longmesh.attention.mask.axes import axes_of, slices_on
from longmesh.attention.mask.band import causal
from longmesh.attention.mask.base import Mask, slices_of
from longmesh.attention.mask.slices import (
    COLUMNS,
    EW,
    HI,
    K0,
    K1,
    LO,
    Q0,
    Q1,
    make_slices,
    shift,
    shift_band,
    tighten,
)
from longmesh.errors import LongmeshError, whole_number


@dataclasses.dataclass(frozen=True)
class Documents(Mask):
    """`lengths[row]` are the documents of a batch row; a single row stands for all."""

    lengths: tuple[tuple[int, ...], ...]
    within: Mask

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    def slices(self, seq_len: int, *, row: int = 0, num_heads: int = 1) -> np.ndarray:
        lengths = self.lengths[row]
        if sum(lengths) != seq_len:
            where = f" of batch row {row}" if self.num_rows > 1 else ""
            raise LongmeshError(
                f"the document lengths{where} add up to {sum(lengths)}, the sequence has {seq_len} tokens; "
                "count padding as a document of its own"
            )
        return _pack(np.array(lengths, dtype=np.int64), self.within, num_heads)

    def visible(self, b, h, q_idx, kv_idx):
        ends = torch.as_tensor(np.cumsum(_padded(self.lengths), axis=1), device=q_idx.device)
        rows = torch.as_tensor(b, device=q_idx.device) % self.num_rows
        first = torch.cat([ends.new_zeros(self.num_rows, 1), ends], dim=1)

        def document(index):
            if self.num_rows == 1:
                return torch.bucketize(index, ends[0], right=True)
            return (index.unsqueeze(-1) >= ends[rows]).sum(-1)

        q_doc, kv_doc = document(q_idx), document(kv_idx)
        inside = self.within.visible(b, h, q_idx - first[rows, q_doc], kv_idx - first[rows, q_doc])
        # A query may stand before the first key; it is in no document.
        return (q_doc == kv_doc) & (q_idx >= 0) & inside

    def __str__(self) -> str:
        rows = self.lengths if self.num_rows > 1 else self.lengths[:1]
        shown = ", ".join(f"{len(r)} of {_span(r)}" for r in rows[:3])
        more = f", {len(rows) - 3} more rows" if len(rows) > 3 else ""
        return f"documents({shown}{more}, within={self.within})"


def _span(lengths: Sequence[int]) -> str:
    """The shortest and the longest length, or the one that all have."""
    least, most = min(lengths, default=0), max(lengths, default=0)
    return f"{least}..{most} tokens" if least < most else "1 token" if most == 1 else f"{most} tokens"


def _padded(lengths: tuple[tuple[int, ...], ...]) -> np.ndarray:
    width = max(map(len, lengths))
    return np.array([row + (0,) * (width - len(row)) for row in lengths], dtype=np.int64)


def _pack(lengths: np.ndarray, within: Mask, num_heads: int) -> np.ndarray:
    """The slices of `within`, lowered for each length and put one after another."""
    lengths = lengths[lengths > 0]
    starts = np.cumsum(lengths) - lengths
    band = within.band()
    if band is not None:
        out = np.zeros((len(lengths), COLUMNS), dtype=np.int64)
        out[:, Q0] = out[:, K0] = starts
        out[:, Q1] = out[:, K1] = starts + lengths
        out[:, LO], out[:, HI], out[:, EW] = band[0], band[1], 0
        return tighten(out)
    parts = [np.zeros((0, COLUMNS), dtype=np.int64)]
    for length in sorted(set(lengths.tolist())):
        lowered = slices_of(within, length, num_heads=num_heads)
        at = starts[lengths == length]
        parts.append(shift(np.tile(lowered, (len(at), 1)), np.repeat(at, len(lowered))))
    out = np.concatenate(parts)
    return out[np.lexsort((out[:, K0], out[:, Q0]))]


def documents(
    lengths: Sequence[int] | Sequence[Sequence[int]],
    within: Mask | None = None,
    *,
    kv_lengths: Sequence[int] | Sequence[Sequence[int]] | None = None,
) -> Mask:
    """Packed documents of these lengths (a list for each batch row, or one for all of them).

    Where keys are other tokens than queries, `kv_lengths` are the documents of the keys: document n of the queries sees
    document n of the keys.

    >>> i, j = torch.arange(4)[:, None], torch.arange(4)
    >>> masks.documents([3, 1]).visible(0, 0, i, j).long()
    tensor([[1, 0, 0, 0],
            [1, 1, 0, 0],
            [1, 1, 1, 0],
            [0, 0, 0, 1]])
    >>> masks.documents([[3, 1], [2, 2]]).num_rows  # a list for each row of the batch
    2
    >>> i, j = torch.arange(2)[:, None], torch.arange(4)
    >>> masks.documents([1, 1], kv_lengths=[3, 1]).visible(0, 0, i, j).long()
    tensor([[1, 1, 1, 0],
            [0, 0, 0, 1]])
    """
    if kv_lengths is not None:
        return PairedDocuments(_clean(lengths), _clean(kv_lengths), _inside("documents", within))
    return Documents(_clean(lengths), _inside("documents", within))


def _clean(lengths: Sequence[int] | Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """The documents of each batch row, as whole numbers."""
    listed = [x.tolist() if isinstance(x, np.ndarray | torch.Tensor) else x for x in lengths]
    rows = listed if listed and isinstance(listed[0], list | tuple) else [listed]
    clean = tuple(tuple(whole_number("a document's length", n) for n in row) for row in rows)  # type: ignore[union-attr]
    for row in clean:
        if min(row, default=0) < 0:
            raise LongmeshError(f"documents(): a length is {min(row)}; lengths must be 0 or more")
    return clean


def _inside(what: str, within: Mask | None) -> Mask:
    """The mask inside a document, if it can be one; causal unless told."""
    if within is None:
        return causal()
    if not isinstance(within, Mask):
        raise LongmeshError(f"{what}(within={within!r}): not a mask; wrap a function in masks.mask_mod(fn)")
    if within.num_rows > 1:
        raise LongmeshError(
            f"{what}(within={within}): the mask inside has {within.num_rows} batch rows; "
            "give one that is the same for all rows"
        )
    return within


def from_cu_seqlens(cu_seqlens: Sequence[int], within: Mask | None = None) -> Mask:
    """Documents from cumulative lengths `[0, end of first, end of second, ...]`.

    >>> masks.from_cu_seqlens([0, 3, 4]) == masks.documents([3, 1])
    True
    """
    ends = np.array([whole_number("from_cu_seqlens(): an end", x) for x in cu_seqlens], dtype=np.int64)
    if len(ends) == 0 or ends[0] != 0 or (np.diff(ends) < 0).any():
        raise LongmeshError(
            f"from_cu_seqlens({ends.tolist()[:8]}): must start at 0 and never fall; "
            "for plain lengths use documents(lengths)"
        )
    return documents(np.diff(ends).tolist(), within)


@dataclasses.dataclass(frozen=True)
class Chunked(Mask):
    size: int
    within: Mask

    def slices(self, seq_len: int, *, row: int = 0, num_heads: int = 1) -> np.ndarray:
        whole, rest = divmod(seq_len, self.size)
        return _pack(np.array([self.size] * whole + [rest], dtype=np.int64), self.within, num_heads)

    def visible(self, b, h, q_idx, kv_idx):
        same = q_idx // self.size == kv_idx // self.size
        return same & self.within.visible(b, h, q_idx % self.size, kv_idx % self.size)

    def __str__(self) -> str:
        return f"chunked({self.size}, within={self.within})"


def chunked(n: int, within: Mask | None = None) -> Mask:
    """Chunks of `n` tokens that don't see each other; `within` a chunk, causal by default.

    >>> i, j = torch.arange(4)[:, None], torch.arange(4)
    >>> masks.chunked(2).visible(0, 0, i, j).long()
    tensor([[1, 0, 0, 0],
            [1, 1, 0, 0],
            [0, 0, 1, 0],
            [0, 0, 1, 1]])
    """
    n = whole_number("chunked(n)", n)
    if n < 1:
        raise LongmeshError(f"chunked({n}): a chunk has at least 1 token")
    return Chunked(n, _inside("chunked", within))


Lengths = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class PairedDocuments(Mask):
    """`lengths[row]` are the documents of a batch row's queries and `kv_lengths[row]` those of its keys."""

    lengths: Lengths
    kv_lengths: Lengths
    within: Mask

    def __post_init__(self) -> None:
        given = [[len(row) for row in side] for side in (self.lengths, self.kv_lengths)]
        if given[0] != given[1]:
            raise LongmeshError(
                f"documents(): {given[0]} documents of queries and {given[1]} of keys in the batch rows; each document "
                "of queries needs one of keys (0 tokens for none), in every row"
            )

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def numbers_queries(self) -> Literal["all"]:
        return "all"

    def slices(self, seq_len: int, *, row: int = 0, num_heads: int = 1) -> np.ndarray:
        return self.slices_between(0, seq_len, seq_len, row=row, num_heads=num_heads)

    def slices_between(
        self, start: int, stop: int, kv_len: int, *, row: int = 0, num_heads: int = 1
    ) -> np.ndarray:
        queries, keys = self.lengths[row], self.kv_lengths[row]
        for what, total, length in (("queries", sum(queries), stop - start), ("keys", sum(keys), kv_len)):
            if total != length:
                where = f" in batch row {row}" if self.num_rows > 1 else ""
                raise LongmeshError(
                    f"the documents of {what}{where} add up to {total}, there are {length} {what}; count padding as a "
                    "document of its own"
                )
        parts, q, k = [make_slices()], 0, 0
        for size, kv_size in zip(queries, keys, strict=True):
            if size and kv_size:
                parts.append(_moved(_inside_pair(self.within, size, kv_size, num_heads), q, k))
            q, k = q + size, k + kv_size
        return np.concatenate(parts)

    def visible(self, b, h, q_idx, kv_idx) -> Any:
        device = q_idx.device
        ends, kv_ends = (_ends(side).to(device) for side in (self.lengths, self.kv_lengths))
        rows = torch.as_tensor(b, device=device) % self.num_rows
        q_doc, kv_doc = _document(q_idx, ends, rows), _document(kv_idx, kv_ends, rows)
        first, kv_first = (torch.cat([e.new_zeros(e.shape[0], 1), e], dim=1) for e in (ends, kv_ends))
        # A document's queries are its last ones, unless the mask inside numbers them by itself.
        ahead = 0 if self.within.numbers_queries else (kv_first.diff(dim=1) - first.diff(dim=1))[rows, q_doc]
        inside = self.within.visible(b, h, q_idx - first[rows, q_doc] + ahead, kv_idx - kv_first[rows, q_doc])
        return (q_doc == kv_doc) & inside

    def __str__(self) -> str:
        queries, keys = (
            f"{min(row, default=0)}..{max(row, default=0)}" for row in (self.lengths[0], self.kv_lengths[0])
        )
        more = f", {self.num_rows - 1} more rows" if self.num_rows > 1 else ""
        count = len(self.lengths[0])
        return f"documents({count} of {queries} queries and {keys} keys{more}, within={self.within})"


@functools.lru_cache(maxsize=512)
def _inside_pair(within: Mask, size: int, kv_size: int, num_heads: int) -> np.ndarray:
    return slices_on(within, axes_of(within, size, kv_size, None), num_heads=num_heads)


def _moved(slices: np.ndarray, q: int, k: int) -> np.ndarray:
    out = slices.copy()
    out[:, [Q0, Q1]] += q
    out[:, [K0, K1]] += k
    return shift_band(out, np.full(len(out), k - q))


def _ends(lengths: Lengths) -> torch.Tensor:
    width = max(map(len, lengths))
    padded = np.array([row + (0,) * (width - len(row)) for row in lengths], dtype=np.int64)
    return torch.from_numpy(np.cumsum(padded.reshape(len(lengths), width), axis=1))


def _document(index: torch.Tensor, ends: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    if ends.shape[0] == 1:
        return torch.bucketize(index, ends[0], right=True)
    return (index.unsqueeze(-1) >= ends[rows]).sum(-1)
