"""The gated delta rule: a state that forgets, and corrects what it holds for a key instead of adding to it.

    S_t = (I - b_t k_t k_t') exp(g_t) S_(t-1) + b_t k_t v_t',      o_t = q_t' S_t

In a chunk whose entering state is S the tokens' corrections u_t solve one triangular system:

    (I + b P(k, k)) u = b v - b (k exp(G)) S       so       u = ubar - w S
    o  = (q exp(G)) S + P(q, k) u                  so       R = q exp(G) - P(q, k) w
    S' = exp(G_C) S + leaving' u                   so       T = exp(G_C) - leaving' w,   U = leaving' ubar

P: see decay.py, strictly below the diagonal for (k, k); leaving = k exp(G_C - G). g is one number a head
(Qwen3-Next) or one a feature (Kimi). Shapes: N chunks, B batch, H heads, C tokens, K key features, V value
features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longmesh.recurrent.chunks import Chunks
from longmesh.recurrent.kernel.decay import decayed_products, running_decay
from longmesh.recurrent.kernel.form import Form, MatrixKernel, MatrixReading
from longmesh.recurrent.transition import MATRIX, Transitions


class GatedDeltaRule(MatrixKernel):
    """Inputs q, k (batch, tokens, heads, K), v (.., V), g (batch, tokens, heads) or (.., K), beta as the first g."""

    name = "chunked gated delta rule"

    def transition_numel(self, inputs: Sequence[Tensor]) -> int:
        batch, _, heads, keys = inputs[1].shape
        return batch * heads * keys * keys

    def form(self, inputs: Sequence[Tensor], chunks: Chunks) -> Form:
        q, k, v, g, beta = inputs
        sizes = [v.shape[-1], k.shape[-1]]
        decay = running_decay(g)
        whole = decay[..., -1:, :]
        entering = chunks.entering(decay.exp())
        system = beta * decayed_products(k, k, decay, chunks, strict=True)
        given = torch.cat([v, k * entering], -1) * beta
        solved = torch.linalg.solve_triangular(system, given, upper=False, unitriangular=True)
        leaving = chunks.leaving(k * (whole - decay).exp())
        updates, passed = (leaving.mT @ solved).split(sizes, -1)
        kept = chunks.passing(whole.exp()).expand(*whole.shape[:-1], k.shape[-1]).squeeze(-2)

        def reading() -> MatrixReading:
            local, seen = (decayed_products(q, k, decay, chunks) @ solved).split(sizes, -1)
            return MatrixReading(q * entering - seen, local)

        return Form(Transitions(torch.diag_embed(kept) - passed, MATRIX), updates, reading)
