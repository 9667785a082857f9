"""Documents of both sides: document n of the queries sees document n of the keys, and nothing else.

documents([1, 2], kv_lengths=[3, 2])         queries are numbered from 0, and so are keys. Inside a document the queries
# # # . .                                    are the last ones of its keys, for the mask `within`: here causal()
. . . # .
. . . # #
"""

import dataclasses
import functools
from typing import Any, Literal

import numpy as np
import torch

from longmesh.attention.mask.axes import axes_of, slices_on
from longmesh.attention.mask.base import Mask
from longmesh.attention.mask.slices import K0, K1, Q0, Q1, make_slices, shift_band
from longmesh.errors import LongmeshError

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
                parts.append(_moved(_inside(self.within, size, kv_size, num_heads), q, k))
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
def _inside(within: Mask, size: int, kv_size: int, num_heads: int) -> np.ndarray:
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
