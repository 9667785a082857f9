"""A linear recurrence of each channel by itself: h_t = exp(g_t) h_(t-1) + x_t, and h_t is the output (RG-LRU).

What decays over several tokens is exp of a running sum; the chunk's own part is a loop over its tokens, all chunks at
once.

Shapes: N chunks, B batch, C tokens, D channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longmesh.recurrent.chunks import Chunks
from longmesh.recurrent.kernel.form import Form
from longmesh.recurrent.transition import ELEMENTWISE, Transitions


@dataclass(frozen=True, eq=False)
class DiagonalReading:
    """`kept` (N, B, C, D): what of the entering state is left at each token."""

    kept: Tensor
    local: Tensor

    def outputs(self, states: Tensor) -> Tensor:
        return self.local + self.kept * states.unsqueeze(-2)


@dataclass(frozen=True)
class DiagonalScan:
    """Inputs x, g (batch, tokens, channels)."""

    name: str = "diagonal scan"
    chunk: int = 32
    chunks_at_once: int = 32
    token_dim: int = 1

    def split(self, inputs: Sequence[Tensor], chunks: Chunks) -> list[Tensor]:
        return [chunks.split(x.unsqueeze(2)).squeeze(2) for x in inputs]

    def join(self, outputs: Tensor, chunks: Chunks) -> Tensor:
        return chunks.join(outputs.unsqueeze(2)).squeeze(2)

    def transition_numel(self, inputs: Sequence[Tensor]) -> int:
        return inputs[0].shape[0] * inputs[0].shape[2]

    def form(self, inputs: Sequence[Tensor], chunks: Chunks) -> Form:
        x, g = inputs
        left = g.cumsum(-2).exp()
        left = left if chunks.enters is None else left * chunks.enters.squeeze(2)
        local = _walk(x, g, chunks)
        passing = left[..., -1, :]
        return Form(
            Transitions(passing, ELEMENTWISE), local[..., -1, :], lambda: DiagonalReading(left, local)
        )

    def adjoint(
        self, kept: Tensor | None, inputs: Sequence[Tensor], gradient: Tensor, chunks: Chunks
    ) -> Tensor:
        assert kept is not None, "what is left of the state was kept"
        return (kept * gradient).sum(-2)


def _walk(x: Tensor, g: Tensor, chunks: Chunks) -> Tensor:
    """The recurrence of each chunk alone, from nothing."""
    decay = g.exp()
    state = x[..., 0, :]
    states = [state]
    for t in range(1, chunks.size):
        kept = decay[..., t, :] * state
        if chunks.same is not None:
            kept = kept * chunks.same[..., 0, t, t - 1].unsqueeze(-1)
        state = kept + x[..., t, :]
        states.append(state)
    return torch.stack(states, -2)
