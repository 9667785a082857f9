"""Kernels of flash-linear-attention: delta rules and linear attention, with a decay per head or per feature.

All of them take q, k (B, T, H, K), v (B, T, H, V), decays in log space, `scale`, `initial_state` and give the final
one, (sequences, H, K, V) in fp32; with `cu_seqlens` the batch is one row of sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longmesh.recurrent.kernel.span import Span
from longmesh.recurrent.transition import ELEMENTWISE, MATRIX, Algebra


@dataclass(frozen=True)
class FlaKernel:
    """`function`: chunk_gated_delta_rule, chunk_kda, chunk_simple_gla or chunk_gla."""

    name: str
    function: Callable[..., Any]
    algebra: Algebra

    def __call__(self, inputs: Sequence[Tensor], entering: Tensor, span: Span) -> tuple[Tensor, Tensor]:
        names = ("q", "k", "v", "g", "beta")
        given = {name: span.join_rows(x).contiguous() for name, x in zip(names, inputs, strict=False)}
        if span.cu_seqlens is not None:
            given["cu_seqlens"] = span.cu_seqlens
        out, final = self.function(
            **given, scale=1.0, initial_state=span.spread(entering), output_final_state=True
        )
        return span.split_rows(out), span.pick(final)

    def can_run(self, span: Span) -> bool:
        return True

    def empty_state(self, inputs: Sequence[Tensor]) -> Tensor:
        k, v = inputs[1:3]
        shape = (k.shape[0], k.shape[2], k.shape[3], v.shape[3])
        return torch.zeros(shape, dtype=torch.float32, device=k.device)

    def transition_shape(self, inputs: Sequence[Tensor]) -> tuple[int, ...]:
        k, g = inputs[1], inputs[3]
        batch, _, heads, features = k.shape
        if self.algebra is ELEMENTWISE:
            return batch, heads, 1 if g.ndim == 3 else features, 1
        return batch, heads, features, features

    def transition(self, inputs: Sequence[Tensor], span: Span) -> Tensor:
        q, k, v, g, *others = inputs
        if self.algebra is ELEMENTWISE:
            whole = g.float().sum(1).exp()
            return span.passing(whole[..., None, None] if g.ndim == 3 else whole[..., None])
        features = k.shape[-1]
        eye = torch.eye(features, dtype=torch.float32, device=k.device)
        state = eye.expand(k.shape[0], k.shape[2], features, features).contiguous()
        nothing = v.new_zeros((*v.shape[:-1], features))
        return span.passing(self([q, k, nothing, g, *others], state, span)[1])


def delta_rule(name: str, function: Callable[..., Any]) -> FlaKernel:
    return FlaKernel(name, function, MATRIX)


def linear(name: str, function: Callable[..., Any]) -> FlaKernel:
    return FlaKernel(name, function, ELEMENTWISE)
