"""The two kinds of T in S_out = T S_in + U, and how maps are applied, composed and transposed.

    elementwise   T broadcasts against the state: a number per head (…, 1, 1), a diagonal (…, K, 1), or both dims
    matrix        T is (…, K, K) and multiplies the state (…, K, V) from the left

Maps compose: (T2, U2) after (T1, U1) is (T2 T1, T2 U1 + U2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Transitions:
    """Of a run of chunks: `values` (chunks, batch, ...), and whether they are matrices."""

    values: Tensor
    is_matrix: bool

    def apply(self, chunk: int, state: Tensor) -> Tensor:
        return apply(self.values[chunk], state, self.is_matrix)

    def whole(self) -> Tensor:
        """T of the whole run: the product of its chunks."""
        if not self.is_matrix:
            return self.values.prod(0)
        whole = self.values[0]
        for value in self.values[1:]:
            whole = value @ whole
        return whole

    def transposed(self) -> Transitions:
        """For gradients, which run the other way: chunks from last to first, each transposed."""
        values = self.values.flip(0)
        return Transitions(values.mT if self.is_matrix else values, self.is_matrix)


def apply(transition: Tensor, state: Tensor, is_matrix: bool) -> Tensor:
    return transition @ state if is_matrix else transition * state


def compose(later: Tensor, earlier: Tensor, is_matrix: bool) -> Tensor:
    return later @ earlier if is_matrix else later * earlier


def outer(gradient: Tensor, state: Tensor, like: Tensor, is_matrix: bool) -> Tensor:
    """The gradient of T, from that of T S and from S; summed to the shape that T has."""
    if is_matrix:
        return gradient @ state.mT
    return (gradient * state).sum_to_size(like.shape)


def identity_like(transition: Tensor, is_matrix: bool) -> Tensor:
    """The T that changes nothing."""
    if is_matrix:
        eye = torch.eye(transition.shape[-1], dtype=transition.dtype, device=transition.device)
        return eye.expand_as(transition)
    return torch.ones_like(transition)
