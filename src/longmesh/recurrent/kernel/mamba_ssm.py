"""Kernels of mamba_ssm: Mamba 2's SSD, and Mamba 1's selective scan.

`mamba_chunk_scan_combined` takes initial states (B, H, P, N), transposed to ours, and `seq_idx` for documents.
`selective_scan_fn` takes neither, and gives its last state no gradient. So the entering state's term is added, and the
last state is read as an output: one more token for each of its n numbers, which changes nothing (dt = 0) and reads one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longmesh.recurrent.kernel.span import Span
from longmesh.recurrent.transition import ELEMENTWISE, Algebra

_CHUNK = 256


@dataclass(frozen=True)
class MambaSsd:
    """Inputs x (B, T, H, P), dt (B, T, H), A (H,), B, C (B, T, groups, N); a state is (B, H, N, P)."""

    name: str
    function: Callable[..., Any]
    algebra: Algebra = ELEMENTWISE

    def __call__(self, inputs: Sequence[Tensor], entering: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        x, dt, A, B, C = inputs
        out, final = self.function(
            x, dt, A, B, C, _CHUNK,
            initial_states=entering.mT.contiguous(), seq_idx=span.seq_idx, return_final_states=True,
        )  # fmt: skip
        return out, final.mT.float()

    def can_run(self, span: Span) -> bool:
        return True

    def empty_state(self, inputs: Sequence[Tensor]) -> Tensor:
        x, B = inputs[0], inputs[3]
        shape = (x.shape[0], x.shape[2], B.shape[3], x.shape[3])
        return torch.zeros(shape, dtype=torch.float32, device=x.device)

    def transition_shape(self, inputs: Sequence[Tensor]) -> tuple[int, ...]:
        batch, _, heads = inputs[1].shape
        return batch, heads, 1, 1

    def transition(self, inputs: Sequence[Tensor], span: Span) -> Tensor:
        dt, A = inputs[1].float(), inputs[2].float()
        return span.passing((dt * A).sum(1).exp()[..., None, None])


@dataclass(frozen=True)
class Selective:
    """Inputs x, dt (B, D, T), A (D, n), B, C (B, n, T); a state is (B, D, n)."""

    name: str
    function: Callable[..., Any]
    algebra: Algebra = ELEMENTWISE

    def __call__(self, inputs: Sequence[Tensor], entering: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        x, dt, A, B, C = inputs
        states, tokens = A.shape[1], x.shape[2]
        longer = [torch.nn.functional.pad(each, (0, states)) for each in (x, dt, B)]
        reads = torch.eye(states, dtype=C.dtype, device=C.device).expand(len(C), -1, -1)
        out = self.function(longer[0], longer[1], A.float(), longer[2], torch.cat([C, reads], -1))
        local, last = out.split([tokens, states], -1)
        passed = dt.float().cumsum(-1)
        added = torch.zeros_like(passed)
        for n in range(states):
            left = (A[:, n, None] * passed).exp() * entering[..., n, None]
            added = added + C[:, None, n] * left
        leaving = last.float() + (A * passed[..., -1:]).exp() * entering
        return (local.float() + added).to(x.dtype), leaving

    def can_run(self, span: Span) -> bool:
        return span.seq_idx is None

    def empty_state(self, inputs: Sequence[Tensor]) -> Tensor:
        x, A = inputs[0], inputs[2]
        return torch.zeros((len(x), *A.shape), dtype=torch.float32, device=x.device)

    def transition_shape(self, inputs: Sequence[Tensor]) -> tuple[int, ...]:
        return len(inputs[0]), *inputs[2].shape

    def transition(self, inputs: Sequence[Tensor], span: Span) -> Tensor:
        dt, A = inputs[1].float(), inputs[2].float()
        return span.passing((dt.sum(-1).unsqueeze(-1) * A).exp())
