"""The kinds of T in S_out = T S_in + U, and how maps are applied, composed and transposed.

    elementwise   T broadcasts against the state: a number per head (…, 1, 1), a diagonal (…, K, 1), or both dims
    matrix        T is (…, K, K) and multiplies the state (…, K, V) from the left
    maximum       T + S_in instead of the product and the larger of two instead of their sum: a running maximum

Maps compose: (T2, U2) after (T1, U1) is (T2 T1, T2 U1 + U2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Algebra:
    """`apply`: T on a state. `compose`: T2 after T1. `add`: two states. `nothing`: the state that adds nothing."""

    apply: Callable[[Tensor, Tensor], Tensor]
    compose: Callable[[Tensor, Tensor], Tensor]
    add: Callable[[Tensor, Tensor], Tensor]
    nothing: float = 0.0


ELEMENTWISE = Algebra(torch.mul, torch.mul, torch.add)
MATRIX = Algebra(torch.matmul, torch.matmul, torch.add)
MAXIMUM = Algebra(torch.add, torch.add, torch.maximum, -torch.inf)


@dataclass(frozen=True, slots=True)
class Transitions:
    """Of a run of chunks: `values` (chunks, batch, ...)."""

    values: Tensor
    algebra: Algebra

    def apply(self, chunk: int, state: Tensor) -> Tensor:
        return self.algebra.apply(self.values[chunk], state)

    def whole(self) -> Tensor:
        """T of the whole run: the product of its chunks."""
        if self.algebra is ELEMENTWISE:
            return self.values.prod(0)
        whole = self.values[0]
        for value in self.values[1:]:
            whole = self.algebra.compose(value, whole)
        return whole

    def transposed(self) -> Transitions:
        """For gradients, which run the other way: chunks from last to first, each transposed."""
        values = self.values.flip(0)
        return Transitions(values.mT if self.algebra is MATRIX else values, self.algebra)
