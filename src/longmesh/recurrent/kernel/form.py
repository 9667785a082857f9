"""What a kernel says of chunks of tokens: how each maps the state that enters it, and what it reads from it.

    S' = T S + U        transitions, updates: what travels is made of these
    o  = local + R S    a `Reading`: not needed before the state arrives, so it is made while the exchange is under way

A kernel is a pure, differentiable function of a chunk's tokens; states, ranks and documents that cross them are not
its business. Shapes: N chunks, B batch, then the kernel's own dims.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from longmesh.recurrent.chunks import Chunks
from longmesh.recurrent.transition import Transitions


class Reading(Protocol):
    """`kept`: what backward needs of it beside the inputs, if anything."""

    @property
    def kept(self) -> Tensor | None: ...

    def outputs(self, states: Tensor) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Form:
    """Of some chunks: `updates` (N, B, ...) are shaped as states; `reading` is called once, later."""

    transitions: Transitions
    updates: Tensor
    reading: Callable[[], Reading]


class ChunkKernel(Protocol):
    """`name` is shown by explain(). `chunk`: tokens of a chunk; `chunks_at_once`: how many are computed together."""

    @property
    def name(self) -> str: ...

    @property
    def chunk(self) -> int: ...

    @property
    def chunks_at_once(self) -> int: ...

    @property
    def token_dim(self) -> int:
        """The dim of the first input that is the sequence."""
        ...

    def split(self, inputs: Sequence[Tensor], chunks: Chunks) -> list[Tensor]:
        """Inputs in chunks, (N, B, ...); what is the same for all tokens gets N = 1."""
        ...

    def join(self, outputs: Tensor, chunks: Chunks) -> Tensor:
        """Outputs of the chunks as the tokens had them."""
        ...

    def form(self, inputs: Sequence[Tensor], chunks: Chunks) -> Form: ...

    def transition_numel(self, inputs: Sequence[Tensor]) -> int:
        """Elements of T for a whole batch, from inputs as they are given."""
        ...

    def adjoint(
        self, kept: Tensor | None, inputs: Sequence[Tensor], gradient: Tensor, chunks: Chunks
    ) -> Tensor:
        """R' do: the gradient of the entering states by the outputs."""
        ...


@dataclass(frozen=True, eq=False)
class MatrixReading:
    """Of states that are matrices (N, B, H, K, V): reads (N, B, H, C, K), local (N, B, H, C, V)."""

    kept: Tensor
    local: Tensor

    def outputs(self, states: Tensor) -> Tensor:
        return self.local + self.kept @ states


class MatrixKernel:
    """What kernels whose states are matrices, (K, V) for each head, have in common."""

    chunk: int = 64
    chunks_at_once: int = 16
    token_dim: int = 1

    def split(self, inputs: Sequence[Tensor], chunks: Chunks) -> list[Tensor]:
        return [chunks.split(x) for x in inputs]

    def join(self, outputs: Tensor, chunks: Chunks) -> Tensor:
        return chunks.join(outputs)

    def adjoint(
        self, kept: Tensor | None, inputs: Sequence[Tensor], gradient: Tensor, chunks: Chunks
    ) -> Tensor:
        assert kept is not None, "a matrix state is read by rows that were kept"
        return kept.mT @ gradient
