"""What every block kernel is: the values it is given and the two functions it has.

Shapes: B batch, H query heads, G key/value heads (H is a multiple of G), S rows of the query buffer,
K rows of the key/value buffer, D head dim, E value head dim.

A kernel works on plain detached tensors of one rank and one stage. The blocks of a stage are an
exact disjoint cover, in coordinates of the two buffers; what the tokens' global positions are is
told by `Coordinates`, and matters only to what looks at them (score_mod, mask_mod, bias, dropout).
Score functions are free to look at the head and the batch row too, so a rank that holds only some
heads must say which (`head_start`): forgetting it gives every rank the first heads' slopes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from longmesh.attention.kernel.dropout import kept
from longmesh.attention.kernel.merge import PartialResult, accumulate_dtype
from longmesh.attention.mask.block import Block


@dataclass(frozen=True, eq=False)
class Score:
    """How scores are made: ``score_mod(q @ k * scale, b, h, q_idx, kv_idx) + bias``, then mask and softmax.

    `bias` broadcasts to (B, H, S_global, S_global) and is indexed by global positions. `mask_mod` is
    asked only in elementwise blocks. `scale` None is ``1 / sqrt(D)``.
    """

    scale: float | None = None
    score_mod: Callable[..., Tensor] | None = None
    mask_mod: Callable[..., Tensor] | None = None
    bias: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: int | None = None

    def scale_for(self, head_dim: int) -> float:
        return 1.0 / math.sqrt(head_dim) if self.scale is None else self.scale

    def dropout_weight(self, at: tuple[Tensor, Tensor, Tensor, Tensor], dtype: torch.dtype) -> Tensor:
        """What dropout multiplies the probabilities of a tile with: 0, or what makes up for the dropped ones."""
        assert self.dropout_seed is not None, "dropout has a seed"
        return kept(self.dropout_seed, self.dropout_p, at).to(dtype) / (1 - self.dropout_p)


@dataclass(frozen=True, eq=False)
class Coordinates:
    """Which tokens, heads and batch rows the buffers hold, positions on their device. None: row i is token i."""

    q_positions_S: Tensor | None = None
    k_positions_K: Tensor | None = None
    batch_start: int = 0
    head_start: int = 0

    def q_rows(self, start: int, stop: int, device: torch.device) -> Tensor:
        if self.q_positions_S is None:
            return torch.arange(start, stop, device=device)
        return self.q_positions_S[start:stop]

    def k_rows(self, start: int, stop: int, device: torch.device) -> Tensor:
        if self.k_positions_K is None:
            return torch.arange(start, stop, device=device)
        return self.k_positions_K[start:stop]


@dataclass(frozen=True, eq=False)
class Final:
    """What the backward of every stage shares: made once by `finish`, in the accumulating dtype.

    `lse` is +inf for rows that saw nothing, so their probabilities are 0 instead of NaN.
    """

    out_BHSE: Tensor
    lse_BHS: Tensor
    dout_BHSE: Tensor

    @cached_property
    def delta_BHS(self) -> Tensor:
        """Row sums of dout * out. Made when first asked for: the fused kernels make their own."""
        return (self.out_BHSE * self.dout_BHSE).sum(-1)


def finish(out_BHSE: Tensor, lse_BHS: Tensor, dout_BHSE: Tensor) -> Final:
    """Prepares the backward from the final output, its log-sum-exp and the output's gradient."""
    dtype = accumulate_dtype(out_BHSE.dtype)
    out, dout = out_BHSE.detach().to(dtype), dout_BHSE.detach().to(dtype)
    lse = lse_BHS.detach().to(dtype)
    return Final(out, lse.masked_fill(lse == -torch.inf, torch.inf), dout)


@dataclass(frozen=True, eq=False)
class AttentionGradients:
    """Where a backward accumulates: contiguous buffers in the accumulating dtype.

    `dcaptured` are the gradients of the tensors that `captured_tensors(score_mod)` lists, in order.
    """

    dq_BHSD: Tensor
    dk_BGKD: Tensor
    dv_BGKE: Tensor
    dbias: Tensor | None = None
    dcaptured: list[Tensor] = field(default_factory=list)


def zero_like(tensor: Tensor) -> Tensor:
    """A contiguous zero gradient for `tensor`, in the accumulating dtype."""
    return torch.zeros(tensor.shape, dtype=accumulate_dtype(tensor.dtype), device=tensor.device)


class KernelWork(NamedTuple):
    """What a kernel computes at a time: blocks, in coordinates of a query buffer and a key/value buffer."""

    q_BHSD: Tensor
    k_BGKD: Tensor
    v_BGKE: Tensor
    blocks: Sequence[Block]
    score: Score = Score()
    where: Coordinates = Coordinates()


class Need(NamedTuple):
    """What is asked of a kernel, as values: what the choice depends on."""

    device: str
    dtype: torch.dtype
    head_dim: int
    v_head_dim: int
    elementwise: bool = False
    score_mod: bool = False
    bias: bool = False
    bias_grad: bool = False
    dropout: bool = False
    deterministic: bool = False


class Kernel(ABC):
    """Computes blocks. Has no state; `name` is what `explain()` prints and what forces it."""

    name: str

    @abstractmethod
    def refuses(self, need: Need) -> str | None:
        """Why this kernel cannot do what is needed; None if it can."""

    @abstractmethod
    def forward(self, work: KernelWork, state: PartialResult | None = None) -> PartialResult:
        """Attention over the pairs of the blocks, merged into `state` in place (None: nothing seen yet)."""

    @abstractmethod
    def backward(self, work: KernelWork, final: Final, gradients: AttentionGradients) -> None:
        """Adds the gradients of the pairs of the blocks to `gradients`, in place."""
