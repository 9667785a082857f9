"""The math kernel: plain tensor operations, tile by tile, with everything that can be asked for.

Shapes: B batch, H query heads, G key/value heads, R = H / G, S query rows, K key rows, D head dim,
E value head dim, L and M rows and keys of a tile.

Runs on any device and in any dtype, and is the reference for the fused kernels. Nothing of size
L x M outlives its tile: the backward recomputes the scores, and takes the probabilities from the
*final* log-sum-exp, so that they are exact whatever part of the keys this stage holds. score_mod
is differentiated by autograd, tile by tile, together with the tensors it captured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longmesh.attention.kernel import scores
from longmesh.attention.kernel.base import (
    AttentionGradients,
    Coordinates,
    Final,
    Kernel,
    KernelWork,
    Need,
    Score,
)
from longmesh.attention.kernel.lower import as_tile, coalesce
from longmesh.attention.kernel.merge import PartialResult, accumulate_dtype, empty_partial, merge_
from longmesh.attention.mask.block import Block
from longmesh.attention.mods import apply_score_mod, captured_tensors


class _ScoreTile(NamedTuple):
    rows: slice
    keys: slice
    at: tuple[Tensor, Tensor, Tensor, Tensor]  # global batch, head, row and key indices
    seen: Tensor | None


class Math(Kernel):
    """Tiled tensor operations. `tile` bounds the rows and the keys of one tile."""

    name = "math"

    def __init__(self, tile: int = 512) -> None:
        self.tile = tile

    def refuses(self, need: Need) -> str | None:
        if not need.dtype.is_floating_point:
            return f"takes floating point, not {need.dtype}"
        return None

    def forward(self, work: KernelWork, state: PartialResult | None = None) -> PartialResult:
        q_BHSD, k_BGKD, v_BGKE, blocks, score, where = work
        state = empty_partial(q_BHSD, v_BGKE.shape[-1]) if state is None else state
        q, k, v = _operands(q_BHSD, k_BGKD, v_BGKE)
        for tile in self._tiles(blocks, score, where, q_BHSD):
            with torch.no_grad():
                s = _masked(_scores(q, k, score, tile), tile)
                lse = s.logsumexp(-1)
                p = torch.exp(s - lse.masked_fill(lse == -torch.inf, torch.inf)[..., None])
                if score.dropout_p:
                    p = p * score.dropout_weight(tile.at, p.dtype)
                out = _per_kv_head(p, v) @ v[:, :, None, tile.keys]
                rows = tile.rows
                merge_(state.out_BHSD[:, :, rows], state.lse_BHS[:, :, rows], out.flatten(1, 2), lse)
        return state

    def backward(self, work: KernelWork, final: Final, gradients: AttentionGradients) -> None:
        q_BHSD, k_BGKD, v_BGKE, blocks, score, where = work
        q, k, v = _operands(q_BHSD, k_BGKD, v_BGKE)
        scale = score.scale_for(q.shape[-1])
        captured = captured_tensors(score.score_mod)
        for tile in self._tiles(blocks, score, where, q_BHSD):
            rows, keys = tile.rows, tile.keys
            dot = _dot(q, k, score, tile)
            with torch.set_grad_enabled(score.score_mod is not None):
                dot.requires_grad_(score.score_mod is not None)
                s = _modified(dot, score, tile)
            with torch.no_grad():
                p = torch.exp(
                    _masked(_biased(s.detach(), score, tile), tile) - final.lse_BHS[:, :, rows, None]
                )
                dout = _per_kv_head(final.dout_BHSE[:, :, rows], v)
                dp = (dout @ v[:, :, None, keys].mT).flatten(1, 2)
                dropped = p
                if score.dropout_p:
                    keep = score.dropout_weight(tile.at, p.dtype)
                    dp, dropped = dp * keep, p * keep
                ds = p * (dp - final.delta_BHS[:, :, rows, None])
                gradients.dv_BGKE[:, :, keys] += (_per_kv_head(dropped, v).mT @ dout).sum(2)
                if gradients.dbias is not None:
                    scores.add_bias_gradient_(gradients.dbias, ds, tile.at)
            if score.score_mod is not None:
                ds = _through_score_mod(s, dot, captured, ds, gradients.dcaptured)
            ds = _per_kv_head(ds, v) * scale
            gradients.dq_BHSD[:, :, rows] += (ds @ k[:, :, None, keys]).flatten(1, 2)
            gradients.dk_BGKD[:, :, keys] += (ds.mT @ _per_kv_head(q[:, :, rows], v)).sum(2)

    def _tiles(
        self, blocks: Sequence[Block], score: Score, where: Coordinates, q: Tensor
    ) -> Iterator[_ScoreTile]:
        """The non-empty tiles of the blocks, with what is needed to know who sees whom."""
        B, H, _, _ = q.shape
        for block in coalesce(tuple(blocks)):
            for q0 in range(block.q_start, block.q_stop, self.tile):
                for k0 in range(block.k_start, block.k_stop, self.tile):
                    q1, k1 = min(q0 + self.tile, block.q_stop), min(k0 + self.tile, block.k_stop)
                    piece = block._replace(q_start=q0, q_stop=q1, k_start=k0, k_stop=k1)
                    for t in as_tile(piece):
                        rows, keys = (t.q, t.q + t.rows), (t.k, t.k + t.keys)
                        at = scores.indices(rows, keys, (B, H), where, q.device)
                        seen = scores.visible(t.lo, t.hi, t.elementwise, score, at, t.rows, t.keys)
                        yield _ScoreTile(slice(*rows), slice(*keys), at, seen)


def _operands(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().to(accumulate_dtype(t.dtype)) for t in tensors]


def _per_kv_head(tensor_BHLM: Tensor, kv_BGKD: Tensor) -> Tensor:
    """(B, H, ...) as (B, G, R, ...): the query heads that share a key/value head side by side."""
    return tensor_BHLM.unflatten(1, (kv_BGKD.shape[1], -1))


def _dot(q_BHSD: Tensor, k_BGKD: Tensor, score: Score, tile: _ScoreTile) -> Tensor:
    q = _per_kv_head(q_BHSD[:, :, tile.rows], k_BGKD)
    return (q @ k_BGKD[:, :, None, tile.keys].mT).flatten(1, 2) * score.scale_for(q_BHSD.shape[-1])


def _modified(dot_BHLM: Tensor, score: Score, tile: _ScoreTile) -> Tensor:
    if score.score_mod is None:
        return dot_BHLM
    return apply_score_mod(score.score_mod, dot_BHLM, tile.at)


def _biased(s_BHLM: Tensor, score: Score, tile: _ScoreTile) -> Tensor:
    return (
        s_BHLM
        if score.bias is None
        else s_BHLM + scores.bias_tile(score.bias.detach(), tile.at).to(s_BHLM.dtype)
    )


def _scores(q_BHSD: Tensor, k_BGKD: Tensor, score: Score, tile: _ScoreTile) -> Tensor:
    return _biased(_modified(_dot(q_BHSD, k_BGKD, score, tile), score, tile), score, tile)


def _masked(s_BHLM: Tensor, tile: _ScoreTile) -> Tensor:
    return s_BHLM if tile.seen is None else s_BHLM.masked_fill(~tile.seen, -torch.inf)


def _through_score_mod(
    s: Tensor, dot: Tensor, captured: list[Tensor], ds: Tensor, dcaptured: list[Tensor]
) -> Tensor:
    """The gradient of the plain scores; what the captured tensors get is added to `dcaptured`.

    A score_mod may hide pairs itself (-inf): p and ds are 0 there, and so must be what flows back.
    """
    wanted = [dot, *captured] if dcaptured else [dot]
    first, *rest = torch.autograd.grad(s, wanted, ds, allow_unused=True)
    for total, grad in zip(dcaptured, rest, strict=True):
        if grad is not None:
            total.add_(grad)
    return torch.zeros_like(dot) if first is None else first.nan_to_num(nan=0.0)
