"""What the fused kernels share: the loop over lowered calls, reading tiles and merging or adding results.

Shapes: B batch, H query heads, G key/value heads, X heads with the batch folded in, S query rows,
K key rows, N tiles of a call, L and M rows and keys of a tile, D head dim (of q and k; E of v).

A fused kernel is two functions on the tiles of one call, `attend` and `differentiate`, and a tiling
for each.
Batch and heads are folded into one dim, so that the batch dim is free for tiles; query head x uses
key/value head ``x // (H / G)`` after folding just as before. The pitfalls handled here for all of
them: no call is ever empty, nor has a batch of none; the narrower of q's and v's head dim is padded with
zeros; a row whose mask hides everything gets lse -inf and output 0 whatever the kernel says; no scale is 0 or less.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from longmesh.attention.kernel.base import (
    AttentionGradients,
    Coordinates,
    Final,
    Kernel,
    KernelWork,
    Need,
    Score,
)
from longmesh.attention.kernel.batch import (
    add_tiles_,
    band_mask,
    fold_heads,
    fold_view,
    merge_tiles_,
    read_tiles,
)
from longmesh.attention.kernel.lower import KernelCall, Tiling, lower, num_first
from longmesh.attention.kernel.merge import PartialResult, accumulate_dtype, blank_partial, empty_partial
from longmesh.attention.kernel.scores import additive_mask
from longmesh.attention.mask.block import Block


class TileShape(NamedTuple):
    """How one fused call is masked: causal (top left aligned), or by a mask tensor, or not."""

    causal: bool
    mask: Tensor | None  # (N or 1, X or 1, L, M), additive
    scale: float


class TiledKernel(Kernel):
    """A fused kernel: subclasses say how tiles are cut, in which dtype they compute, and call the two ops."""

    tiling: Tiling
    backward_tiling: Tiling
    pad_head_dim_to: int = 1

    @abstractmethod
    def attend(
        self, q_NXLD: Tensor, k_NXMD: Tensor, v_NXMD: Tensor, shape: TileShape
    ) -> tuple[Tensor, Tensor]:
        """The output (N, X, L, D) and the log-sum-exp (N, X, L) of the tiles."""

    @abstractmethod
    def differentiate(
        self, dout_NXLD: Tensor, q_NXLD: Tensor, k_NXMD: Tensor, v_NXMD: Tensor, out_NXLD: Tensor, lse_NXL: Tensor,
        shape: TileShape,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """The gradients of q, k and v of the tiles, given the final output and log-sum-exp of their rows."""

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def forward(self, work: KernelWork, state: PartialResult | None = None) -> PartialResult:
        q_BHSD, k_BGKD, v_BGKE, blocks, score, where = work
        B, H, S, D = q_BHSD.shape
        E, fresh = v_BGKE.shape[-1], state is None
        if q_BHSD.numel() == 0:
            return empty_partial(q_BHSD, E) if state is None else state
        q, k, v = self._operands(q_BHSD, k_BGKD, v_BGKE)
        factor, scale = safe_scale(score.scale_for(D))
        q = q if factor == 1.0 else q * factor
        calls = _calls(blocks, score, self.tiling)
        shapes = _Shapes(score, where, (B, H), q, scale)
        whole = fresh and len(calls) == 1 and calls[0].q_starts == (0,) and calls[0].rows == S
        if not whole and state is None:
            state = blank_partial(q_BHSD, E) if num_first(calls) == S else empty_partial(q_BHSD, E)
        for call in calls:
            rows, keys = _sizes(call)
            q_t = read_tiles(q, call.q_starts, call.rows, rows)
            k_t, v_t = (read_tiles(t, call.k_starts, call.keys, keys) for t in (k, v))
            shape = shapes.of(call)
            out, lse = self.attend(q_t, k_t, v_t, shape)
            if call.elementwise and shape.mask is not None:
                hidden = (shape.mask == -torch.inf).all(-1)
                lse, out = lse.masked_fill(hidden, -torch.inf), out.masked_fill(hidden[..., None], 0.0)
            if state is None:  # one call for all rows: its result is the state
                dtype = accumulate_dtype(q_BHSD.dtype)
                return PartialResult(*(t[0].unflatten(0, (B, H)).to(dtype) for t in (out[..., :E], lse)))
            folded = fold_view(state.out_BHSD), fold_view(state.lse_BHS)
            merge_tiles_(*folded, out[..., :E], lse, call.q_starts, rows, first=fresh and call.first)
        assert state is not None
        return state

    def backward(self, work: KernelWork, final: Final, gradients: AttentionGradients) -> None:
        q_BHSD, k_BGKD, v_BGKE, blocks, score, where = work
        calls = _calls(blocks, score, self.backward_tiling)
        if not calls or q_BHSD.numel() == 0:
            return
        B, H, _, D = q_BHSD.shape
        E = v_BGKE.shape[-1]
        q, k, v = self._operands(q_BHSD, k_BGKD, v_BGKE)
        factor, scale = safe_scale(score.scale_for(D))
        q = q if factor == 1.0 else q * factor
        out, dout = (operand(t, q.shape[-1], q.dtype) for t in (final.out_BHSE, final.dout_BHSE))
        lse_XS = final.lse_BHS.flatten(0, 1)
        dq, dk, dv = (fold_view(g) for g in (gradients.dq_BHSD, gradients.dk_BGKD, gradients.dv_BGKE))
        shapes = _Shapes(score, where, (B, H), q, scale)
        for call in calls:
            rows, keys = _sizes(call)
            dout_t, q_t, out_t, lse_t = (
                read_tiles(t, call.q_starts, call.rows, rows) for t in (dout, q, out, lse_XS)
            )
            k_t, v_t = (read_tiles(t, call.k_starts, call.keys, keys) for t in (k, v))
            tiles = self.differentiate(dout_t, q_t, k_t, v_t, out_t, lse_t, shapes.of(call))
            dq_t = tiles[0] if factor == 1.0 else tiles[0] * factor
            add_tiles_(dq, dq_t[..., :D], call.q_starts, rows)
            add_tiles_(dk, tiles[1][..., :D], call.k_starts, keys)
            add_tiles_(dv, tiles[2][..., :E], call.k_starts, keys)

    def _operands(self, q_BHSD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor) -> list[Tensor]:
        """Folded to (X, rows, dim), in the dtype of the kernel, and padded to one head dim."""
        width = max(q_BHSD.shape[-1], v_BGKE.shape[-1])
        width = -(-width // self.pad_head_dim_to) * self.pad_head_dim_to
        return [operand(t, width, self.compute_dtype(t.dtype)) for t in (q_BHSD, k_BGKD, v_BGKE)]


def refuses_scores(need: Need) -> str | None:
    """Why no fused kernel can make these scores; None if it can."""
    if need.score_mod:
        return "has no score_mod"
    if need.dropout:
        return "has no dropout that is independent of the layout"
    if need.bias_grad:
        return "has no gradient for a bias"
    return None


def _calls(blocks: Sequence[Block], score: Score, tiling: Tiling) -> tuple[KernelCall, ...]:
    """The lowered blocks. A bias differs from tile to tile, so its blocks are asked for one by one."""
    if score.bias is not None:
        blocks = [block._replace(elementwise=True) for block in blocks]
    return lower(tuple(blocks), tiling)


def safe_scale(scale: float) -> tuple[float, float]:
    """What queries are multiplied with, and the scale that is left to the kernel: its causal mode writes -inf before
    it scales, so that one of 0 or less would make NaN or +inf of it."""
    return (1.0, scale) if scale > 0 else (scale, 1.0)


def operand(tensor_BHSD: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    folded = fold_heads(tensor_BHSD.detach()).to(dtype)
    return F.pad(folded, (0, width - folded.shape[-1])) if folded.shape[-1] < width else folded


def _sizes(call: KernelCall) -> tuple[list[int] | None, list[int] | None]:
    if call.sizes is None:
        return None, None
    return [rows for rows, _ in call.sizes], [keys for _, keys in call.sizes]


class _Shapes:
    """The masks of one stage's calls; equal strips share one tensor."""

    def __init__(
        self,
        score: Score,
        where: Coordinates,
        heads: tuple[int, int],
        like: Tensor,
        scale: float,
    ) -> None:
        self._score, self._where, self._heads, self._like = score, where, heads, like
        self._scale = scale
        self._masks: dict[tuple, Tensor] = {}

    def of(self, call: KernelCall) -> TileShape:
        return TileShape(call.causal, self._mask(call), self._scale)

    def _mask(self, call: KernelCall) -> Tensor | None:
        if call.elementwise:
            mask = additive_mask(call, self._score, self._where, self._heads, self._like)
            return mask.expand(1, -1, call.rows, call.keys)
        if call.causal or (call.sizes is None and call.full):
            return None
        key = call[:4] + (call.sizes,)
        if key not in self._masks:
            args = (_sizes(call)[1], self._like.dtype, self._like.device)
            self._masks[key] = band_mask(call.rows, call.keys, call.lo, call.hi, *args)
        return self._masks[key].expand(len(call.q_starts), 1, call.rows, call.keys)
