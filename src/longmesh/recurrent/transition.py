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
    """Of a run of chunks: `values` (chunks, batch, ...). States pass them in order, or from last to first."""

    values: Tensor
    algebra: Algebra
    is_reversed: bool = False

    def whole(self) -> Tensor:
        """T of the whole run: the product of its chunks."""
        if self.algebra is ELEMENTWISE:
            return self.values.prod(0)
        first, *others = self._order()
        whole = self.values[first]
        for chunk in others:
            whole = self.algebra.compose(self.values[chunk], whole)
        return whole

    def last(self, updates: Tensor, state: Tensor | None) -> Tensor:
        """The state that leaves the run; `state` enters it, or nothing."""
        for chunk in self._order():
            state = updates[chunk] if state is None else self._step(chunk, state, updates)
        assert state is not None, "a rank has at least one chunk, of padding if it has no token"
        return state

    def walk(self, updates: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """The states that enter the chunks, and the one that leaves the run."""
        if state is None:
            state = torch.full_like(updates[0], self.algebra.nothing)
        states = torch.empty_like(updates)
        for chunk in self._order():
            states[chunk] = state
            state = self._step(chunk, state, updates)
        return states, state

    def transposed(self) -> Transitions:
        """For gradients, which run the other way."""
        values = self.values.mT if self.algebra is MATRIX else self.values
        return Transitions(values, self.algebra, not self.is_reversed)

    def _order(self) -> range:
        chunks = range(len(self.values))
        return chunks[::-1] if self.is_reversed else chunks

    def _step(self, chunk: int, state: Tensor, updates: Tensor) -> Tensor:
        return self.algebra.add(self.algebra.apply(self.values[chunk], state), updates[chunk])


def state_dtype(*inputs: Tensor) -> torch.dtype:
    """What states are kept in."""
    return torch.float64 if any(x.dtype is torch.float64 for x in inputs) else torch.float32
