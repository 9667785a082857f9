"""The classes that a plain nn.Linear, nn.Embedding or nn.LayerNorm becomes when a style is applied to it.

The module stays the object it was, with its hooks, parameters and state dict; only its forward is another one: it
takes what a user gives it and runs as one step (under a compiler, by ops). A subclass with a forward of its own
keeps that, between two hooks.
"""

from __future__ import annotations

import torch
from torch import nn

from longmesh.parallel.compiling import Traceable
from longmesh.parallel.embedding import EmbeddingStep
from longmesh.parallel.linear import LinearStep
from longmesh.parallel.norm import LayerNormStep


class CutLinear(nn.Linear):
    """A Linear whose weight is cut over the ranks of a mesh axis."""

    step: LinearStep
    by_ops: Traceable

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return self.by_ops.run(input, self.weight, self.bias)
        return self.step.run(input, self.weight, self.bias)


class CutEmbedding(nn.Embedding):
    """An Embedding whose table is cut over the ranks of a mesh axis."""

    step: EmbeddingStep
    by_ops: Traceable

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.max_norm is None and not self.sparse and not torch.compiler.is_compiling():
            return self.step.run(input, self.weight, self.padding_idx, self.scale_grad_by_freq)
        return self.by_ops.run(
            input,
            self.weight,
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
        )


class CutLayerNorm(nn.LayerNorm):
    """A LayerNorm with whole parameters, of a sequence that is cut over the ranks of a mesh axis."""

    step: LayerNormStep
    by_ops: Traceable

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        call = self.by_ops.run if torch.compiler.is_compiling() else self.step.run
        return call(input, tuple(self.normalized_shape), self.weight, self.bias, self.eps)


def give_step(
    module: nn.Module, kind: type[nn.Module], step: LinearStep | EmbeddingStep | LayerNormStep
) -> None:
    """Make `module` one of the classes above."""
    module.__class__ = kind
    module.__dict__["step"] = step
    module.__dict__["by_ops"] = Traceable(step.run_by_ops)
