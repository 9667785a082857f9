"""A rank's tokens in chunks of equal length, and which pairs of tokens of a chunk belong to one document.

    tokens      a a a b b | b b c c .        chunk of 5; `.` is padding, which changes no state
    enters      1 1 1 0 0 | 1 1 0 0 0        tokens that see the state entering the chunk
    leaves      0 0 0 1 1 | 0 0 1 1 1        tokens that the state leaving it still knows
    passes      0         | 0                whether what enters leaves: no document begins

Shapes: N chunks, B batch (1 where rows are alike), H heads, C tokens of a chunk, D features.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from longmesh.recurrent.plan import RecurrentPlan


@dataclass(frozen=True, eq=False)
class Chunks:
    """`enters`, `leaves` (N, B, 1, C, 1), `passes` (N, B, 1, 1, 1), `same` (N, B, 1, C, C).

    They are None where no document begins among the tokens.
    """

    num_tokens: int
    size: int
    enters: Tensor | None = None
    leaves: Tensor | None = None
    passes: Tensor | None = None
    same: Tensor | None = None

    @property
    def count(self) -> int:
        """At least one, of padding where a rank has no token."""
        return max(1, -(-self.num_tokens // self.size))

    def split(self, x: Tensor) -> Tensor:
        """(batch, tokens, heads, features) or (batch, tokens, heads) in chunks: (N, B, H, C, D), padded with zeros."""
        if x.ndim == 3:
            x = x.unsqueeze(-1)
        missing = self.count * self.size - x.shape[1]
        if missing:
            x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, missing))
        batch, _, heads, features = x.shape
        return x.view(batch, self.count, self.size, heads, features).permute(1, 0, 3, 2, 4).contiguous()

    def join(self, x: Tensor) -> Tensor:
        """The way back: (N, B, H, C, D) to (batch, tokens, heads, features)."""
        count, batch, heads, size, features = x.shape
        joined = x.permute(1, 0, 3, 2, 4).reshape(batch, count * size, heads, features)
        return joined[:, : self.num_tokens]

    def part(self, chunks: slice) -> Chunks:
        """Some of the chunks, as if they were all, and full."""
        count = len(range(*chunks.indices(self.count)))

        def some(mask: Tensor | None) -> Tensor | None:
            return None if mask is None else mask[chunks]

        return Chunks(
            count * self.size,
            self.size,
            some(self.enters),
            some(self.leaves),
            some(self.passes),
            some(self.same),
        )

    def entering(self, x: Tensor) -> Tensor:
        return x if self.enters is None else x * self.enters

    def leaving(self, x: Tensor) -> Tensor:
        return x if self.leaves is None else x * self.leaves

    def passing(self, x: Tensor) -> Tensor:
        return x if self.passes is None else x * self.passes

    def pairs(self, x: Tensor, *, strict: bool = False) -> Tensor:
        """-inf where a token may not see another of its chunk: later ones (itself, if `strict`), other documents."""
        earlier = torch.ones(self.size, self.size, dtype=torch.bool, device=x.device).tril(
            -1 if strict else 0
        )
        seen = earlier if self.same is None else earlier & self.same
        return x.masked_fill(~seen, -torch.inf)


def chunks_of(
    plan: RecurrentPlan, rank: int, size: int, *, dtype: torch.dtype, device: torch.device
) -> Chunks:
    """The chunks of a rank's tokens."""
    start, stop = plan.span(rank)
    marks = plan.marks(rank)
    num_tokens = stop - start
    if marks is None:
        return Chunks(num_tokens, size)
    count = max(1, -(-num_tokens // size))
    padded = np.zeros((len(marks), count * size), dtype=bool)
    padded[:, :num_tokens] = marks
    number = (
        padded.reshape(len(marks), count, size).cumsum(axis=2).transpose(1, 0, 2)
    )  # documents begun so far

    def to_tensor(values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)

    enters, leaves = number == 0, number == number[:, :, -1:]
    return Chunks(
        num_tokens,
        size,
        to_tensor(enters)[:, :, None, :, None].to(dtype),
        to_tensor(leaves)[:, :, None, :, None].to(dtype),
        to_tensor(number[:, :, -1:] == 0)[:, :, None, :, None].to(dtype),
        to_tensor(number[:, :, :, None] == number[:, :, None, :])[:, :, None],
    )
