"""Mamba 1's selective scan: a diagonal state of its own for each channel.

    h_t[d, n] = exp(dt_t[d] A[d, n]) h_(t-1)[d, n] + dt_t[d] B_t[n] x_t[d],      y_t[d] = sum_n C_t[n] h_t[d, n]

What decays over several tokens has a closed form, exp(A sum dt), so T and the gradient of the entering state need no
loop. The chunk's own part is a loop over its tokens, all chunks at once: C steps instead of one per token.

Shapes: N chunks, B batch, C tokens, D channels, n states of a channel. Every token makes (D, n) numbers, so few chunks
are computed together.
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
class SelectiveReading:
    """Runs the tokens of the chunks from the states that enter them."""

    inputs: Sequence[Tensor]
    chunks: Chunks
    kept: None = None

    def outputs(self, states: Tensor) -> Tensor:
        return _walk(self.inputs, self.chunks, states)[0]


@dataclass(frozen=True)
class SelectiveScan:
    """Inputs x, dt (batch, channels, tokens), A (channels, n), B, C (batch, n, tokens)."""

    name: str = "selective scan"
    chunk: int = 32
    chunks_at_once: int = 8
    token_dim: int = 2

    def split(self, inputs: Sequence[Tensor], chunks: Chunks) -> list[Tensor]:
        x, dt, A, B, C = inputs
        return [
            *(_split(each, chunks) for each in (x, dt)),
            A[None].clamp_min(
                torch.finfo(A.dtype).min
            ),  # padding has dt = 0, and 0 times infinity is no number
            *(_split(each, chunks) for each in (B, C)),
        ]

    def join(self, outputs: Tensor, chunks: Chunks) -> Tensor:
        count, batch, size, channels = outputs.shape
        joined = outputs.transpose(0, 1).reshape(batch, count * size, channels)
        return joined[:, : chunks.num_tokens].mT

    def transition_numel(self, inputs: Sequence[Tensor]) -> int:
        return inputs[0].shape[0] * inputs[2].numel()

    def form(self, inputs: Sequence[Tensor], chunks: Chunks) -> Form:
        _, dt, A, *_ = inputs
        whole = (dt.sum(-2).unsqueeze(-1) * A).exp()
        passing = whole if chunks.passes is None else whole * chunks.passes.flatten(2)[..., None]
        transitions, start = Transitions(passing, ELEMENTWISE), torch.zeros_like(whole)
        return Form(transitions, _walk(inputs, chunks, start)[1], lambda: SelectiveReading(inputs, chunks))

    def adjoint(
        self, kept: Tensor | None, inputs: Sequence[Tensor], gradient: Tensor, chunks: Chunks
    ) -> Tensor:
        _, dt, A, _, C = inputs
        total = None
        passed = torch.zeros_like(dt[..., 0, :])
        for t in range(chunks.size):
            passed = passed + dt[..., t, :]
            read = (passed.unsqueeze(-1) * A).exp() * C[..., t, None, :] * gradient[..., t, :, None]
            if chunks.enters is not None:
                read = read * chunks.enters[..., 0, t, 0][..., None, None]
            total = read if total is None else total + read
        assert total is not None, "a chunk has tokens"
        return total


def _split(x: Tensor, chunks: Chunks) -> Tensor:
    """(batch, features, tokens) to (N, B, C, features), padded with zeros: dt = 0 changes no state."""
    x = torch.nn.functional.pad(x, (0, chunks.count * chunks.size - x.shape[-1]))
    batch, features, _ = x.shape
    return x.view(batch, features, chunks.count, chunks.size).permute(2, 0, 3, 1).contiguous()


def _walk(inputs: Sequence[Tensor], chunks: Chunks, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs (N, B, C, D) and the states (N, B, D, n) that leave the chunks, token by token from those that enter."""
    x, dt, A, B, C = inputs
    outputs: list[Tensor] = []
    written = dt * x
    for t in range(chunks.size):
        decay = (dt[..., t, :, None] * A).exp()
        if chunks.same is not None and t > 0:
            decay = decay * chunks.same[..., 0, t, t - 1][..., None, None]
        elif chunks.enters is not None and t == 0:
            decay = decay * chunks.enters[..., 0, 0, 0][..., None, None]
        state = decay * state + written[..., t, :, None] * B[..., t, None, :]
        outputs.append((state * C[..., t, None, :]).sum(-1))
    return torch.stack(outputs, -2), state
