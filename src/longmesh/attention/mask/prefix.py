"""Prefix LM: a prefix that everyone sees, causal after it.

prefix_lm(2)
# # . . .
# # . . .
# # # . .
# # # # .
# # # # #
"""

import dataclasses

import numpy as np

from longmesh.attention.mask.base import Mask
from longmesh.attention.mask.block import UNBOUNDED
from longmesh.attention.mask.slices import make_slices
from longmesh.errors import LongmeshError, whole_number


@dataclasses.dataclass(frozen=True)
class PrefixLM(Mask):
    prefix: int

    def slices(self, seq_len: int, *, row: int = 0, num_heads: int = 1) -> np.ndarray:
        n = self._checked(seq_len)
        return make_slices((0, seq_len, 0, n), (n, seq_len, n, seq_len, -UNBOUNDED, 0))

    def slices_between(
        self, start: int, stop: int, kv_len: int, *, row: int = 0, num_heads: int = 1
    ) -> np.ndarray:
        n = self._checked(kv_len)
        return make_slices((start, stop, 0, n), (start, stop, n, kv_len, -UNBOUNDED, 0))

    def _checked(self, kv_len: int) -> int:
        if self.prefix > kv_len:
            raise LongmeshError(
                f"prefix_lm({self.prefix}) is longer than the sequence of {kv_len} tokens; "
                f"use full(), or a prefix of at most {kv_len}"
            )
        return self.prefix

    def visible(self, b, h, q_idx, kv_idx):
        return (kv_idx < self.prefix) | (kv_idx <= q_idx)

    def __str__(self) -> str:
        return f"prefix_lm({self.prefix})"


def prefix_lm(n: int) -> Mask:
    """The first `n` keys are visible to all queries; the others to those that don't come before.

    >>> i, j = torch.arange(4)[:, None], torch.arange(4)
    >>> masks.prefix_lm(2).visible(0, 0, i, j).long()
    tensor([[1, 1, 0, 0],
            [1, 1, 0, 0],
            [1, 1, 1, 0],
            [1, 1, 1, 1]])
    """
    n = whole_number("prefix_lm(n)", n)
    if n < 0:
        raise LongmeshError(f"prefix_lm({n}): the prefix must be 0 tokens or more")
    return PrefixLM(n)
