"""A linear recurrence of each channel by itself: h_t = a_t h_(t-1) + x_t, and h_t is the output (RG-LRU).

Factors a = exp(g) are given by their logarithms g, and what is left after several tokens is exp of a running sum. Or
they are given themselves: a factor of 0 has a gradient, and its logarithm has none. The chunk's own part is a loop over
its tokens, all chunks at once.

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
    """Inputs x, g (batch, tokens, channels); factors in the place of g if `by_factor`."""

    by_factor: bool = False
    name: str = "diagonal scan"
    chunk: int = 32
    chunks_at_once: int = 32
    token_dim: int = 1

    def split(self, inputs: Sequence[Tensor], chunks: Chunks) -> list[Tensor]:
        if self.by_factor:  # padding lets states pass
            missing = chunks.count * chunks.size - inputs[1].shape[1]
            inputs = [inputs[0], torch.nn.functional.pad(inputs[1], (0, 0, 0, missing), value=1.0)]
        return [chunks.split(x.unsqueeze(2)).squeeze(2) for x in inputs]

    def join(self, outputs: Tensor, chunks: Chunks) -> Tensor:
        return chunks.join(outputs.unsqueeze(2)).squeeze(2)

    def transition_numel(self, inputs: Sequence[Tensor]) -> int:
        return inputs[0].shape[0] * inputs[0].shape[2]

    def form(self, inputs: Sequence[Tensor], chunks: Chunks) -> Form:
        x, g = inputs
        factor = g if self.by_factor else g.exp()
        left = _products(factor) if self.by_factor else g.cumsum(-2).exp()
        left = left if chunks.enters is None else left * chunks.enters.squeeze(2)
        local = _walk(x, factor, chunks)
        passing = left[..., -1, :]
        return Form(
            Transitions(passing, ELEMENTWISE), local[..., -1, :], lambda: DiagonalReading(left, local)
        )

    def adjoint(
        self, kept: Tensor | None, inputs: Sequence[Tensor], gradient: Tensor, chunks: Chunks
    ) -> Tensor:
        assert kept is not None, "what is left of the state was kept"
        return (kept * gradient).sum(-2)


def _products(factor: Tensor) -> Tensor:
    """Running products. The gradient of torch.cumprod looks for zeros, for which the host waits."""
    found = [factor[..., 0, :]]
    for t in range(1, factor.shape[-2]):
        found.append(found[-1] * factor[..., t, :])
    return torch.stack(found, -2)


def _walk(x: Tensor, factor: Tensor, chunks: Chunks) -> Tensor:
    """The recurrence of each chunk alone, from nothing."""
    state = x[..., 0, :]
    states = [state]
    for t in range(1, chunks.size):
        kept = factor[..., t, :] * state
        if chunks.same is not None:
            kept = kept * chunks.same[..., 0, t, t - 1].unsqueeze(-1)
        state = kept + x[..., t, :]
        states.append(state)
    return torch.stack(states, -2)
