"""Linear attention with decay, of which Mamba 2's SSD is one: S_t = exp(g_t) S_(t-1) + k_t v_t',  o_t = q_t' S_t.

In a chunk whose entering state is S:

    o = P(q, k) v + (q exp(G)) S          P: see decay.py; G: running sum of g
    S' = exp(G_C) S + (k exp(G_C - G))' v

Shapes: N chunks, B batch, H heads, C tokens, K key features, V value features. g is (.., C, 1), or (.., C, K): a
decay per feature.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from longmesh.recurrent.chunks import Chunks
from longmesh.recurrent.kernel.decay import decayed_products, running_decay
from longmesh.recurrent.kernel.form import Form, MatrixKernel, MatrixReading
from longmesh.recurrent.transition import ELEMENTWISE, Transitions


class LinearAttention(MatrixKernel):
    """Inputs q, k (batch, tokens, heads, K), v (.., V), g (batch, tokens, heads) or (.., K)."""

    name = "chunked linear attention"

    def transition_numel(self, inputs: Sequence[Tensor]) -> int:
        batch, _, heads, keys = inputs[1].shape
        return batch * heads * (keys if inputs[3].ndim == 4 else 1)

    def form(self, inputs: Sequence[Tensor], chunks: Chunks) -> Form:
        q, k, v, g = inputs
        decay = running_decay(g)
        whole = decay[..., -1:, :]
        leaving = chunks.leaving(k * (whole - decay).exp())

        def reading() -> MatrixReading:
            scores = decayed_products(q, k, decay, chunks)
            return MatrixReading(chunks.entering(q * decay.exp()), scores @ v)

        return Form(Transitions(chunks.passing(whole.exp()).mT, ELEMENTWISE), leaving.mT @ v, reading)


class Ssd(LinearAttention):
    """Inputs x (batch, tokens, heads, P), dt (batch, tokens, heads), A (heads,), B, C (batch, tokens, groups, N)."""

    name = "chunked SSD"

    def split(self, inputs: Sequence[Tensor], chunks: Chunks) -> list[Tensor]:
        x, dt, A, B, C = inputs
        k, q = (each.repeat_interleave(x.shape[2] // each.shape[2], dim=2) for each in (B, C))
        return super().split([q, k, x * dt.unsqueeze(-1), dt * A], chunks)

    def transition_numel(self, inputs: Sequence[Tensor]) -> int:
        return inputs[1].shape[0] * inputs[1].shape[2]
