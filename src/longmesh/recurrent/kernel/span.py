"""Kernels of other packages, which run all of a rank's tokens at once from an entering state to a leaving one.

    outputs, leaving = kernel(inputs, entering, span)        differentiable in inputs and in `entering`

Documents are sequences of their own in one call: (rows, tokens) laid end to end with `cu_seqlens`, or numbered by
`seq_idx`. The first sequence of a row begins with the entering state, the others with nothing; the leaving state is
that of the last.

Shapes: B batch, T tokens of this rank; states as our own kernels have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from longmesh.recurrent.plan import RecurrentPlan
from longmesh.recurrent.transition import Algebra


@dataclass(frozen=True, eq=False)
class Span:
    """`cu_seqlens` (sequences + 1,), `firsts`, `lasts` (B,): the first and last sequence of each row; `seq_idx` (B, T).
    They are None where no document begins among the tokens, as is `passes` (B,): 1 for rows in which none does."""

    batch: int
    num_tokens: int
    cu_seqlens: Tensor | None = None
    firsts: Tensor | None = None
    lasts: Tensor | None = None
    seq_idx: Tensor | None = None
    passes: Tensor | None = None

    def join_rows(self, x: Tensor) -> Tensor:
        """(B, T, ...) as one row of all tokens, if documents are sequences."""
        return x if self.cu_seqlens is None else x.flatten(0, 1).unsqueeze(0)

    def split_rows(self, x: Tensor) -> Tensor:
        return x if self.cu_seqlens is None else x.squeeze(0).unflatten(0, (self.batch, self.num_tokens))

    def spread(self, state: Tensor) -> Tensor:
        """States of rows as the initial ones of sequences."""
        if self.cu_seqlens is None or self.firsts is None:
            return state
        initial = state.new_zeros((len(self.cu_seqlens) - 1, *state.shape[1:]))
        return initial.index_copy(0, self.firsts, state)

    def pick(self, states: Tensor) -> Tensor:
        """The final states of sequences as those of rows."""
        return states if self.lasts is None else states.index_select(0, self.lasts)

    def passing(self, transition: Tensor) -> Tensor:
        """T, which is zero where a document begins."""
        if self.passes is None:
            return transition
        return transition * self.passes.to(transition.dtype).view(-1, *[1] * (transition.ndim - 1))


class SpanKernel(Protocol):
    """`name` is shown by explain()."""

    @property
    def name(self) -> str: ...

    @property
    def algebra(self) -> Algebra: ...

    def __call__(self, inputs: Sequence[Tensor], entering: Tensor, span: Span) -> tuple[Tensor, Tensor]: ...

    def can_run(self, span: Span) -> bool:
        """Whether the kernel knows documents, if there are any. Ranks may differ: what they send is the same."""
        ...

    def empty_state(self, inputs: Sequence[Tensor]) -> Tensor:
        """Zeros in the shape of a state, fp32."""
        ...

    def transition_shape(self, inputs: Sequence[Tensor]) -> tuple[int, ...]: ...

    def transition(self, inputs: Sequence[Tensor], span: Span) -> Tensor:
        """T of all tokens. No gradient."""
        ...


def span_of(plan: RecurrentPlan, rank: int, batch: int, device: torch.device) -> Span:
    """A rank's tokens, for a batch of this many rows."""
    start, stop = plan.span(rank)
    tokens = stop - start
    marks = plan.marks(rank)
    if marks is None:
        return Span(batch, tokens)
    marks = np.broadcast_to(marks, (batch, tokens))
    passes = ~marks.any(axis=1)
    inner = marks.copy()
    inner[:, :1] = False  # the row's first sequence begins here anyway
    begins = inner.copy()
    begins[:, :1] = True
    bounds = np.append(np.flatnonzero(begins.reshape(-1)), batch * tokens)
    counts = begins.sum(axis=1).cumsum()

    def to_tensor(values: np.ndarray, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(dtype).to(device)

    return Span(
        batch,
        tokens,
        to_tensor(bounds, torch.int64),
        to_tensor(np.append(0, counts[:-1]), torch.int64),
        to_tensor(counts - 1, torch.int64),
        to_tensor(inner.cumsum(axis=1), torch.int32),
        to_tensor(np.asarray(passes), torch.float32),
    )
