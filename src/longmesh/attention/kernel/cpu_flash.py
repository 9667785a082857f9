"""The CPU kernel: torch's fused flash attention, called on the tiles that `lower` cuts.

Shapes: B batch, H query heads, G key/value heads, X heads with the batch folded in, S query rows,
K key rows, N tiles of a call, D head dim (of q and k; E of v), L and M rows and keys of a tile.

What the fused kernel does to the unwary, and what is done here:
- a row whose mask hides every key comes back with lse 0.0: such rows are set to -inf;
- q or k of length zero ends the process: empty tiles never become calls;
- bf16 and fp16 give bf16 and fp16 results, and a backward 6 to 9 times slower: inputs are upcast;
- v must have q's head dim: the narrower is padded with zeros;
- the mask has no gradient: a bias that needs one goes to the math kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from longmesh.attention.block import Block
from longmesh.attention.kernel.base import Coordinates, Final, Gradients, Kernel, Need, Score
from longmesh.attention.kernel.batch import (
    add_tiles_,
    band_mask,
    fold_heads,
    fold_view,
    merge_tiles_,
    read_tiles,
)
from longmesh.attention.kernel.lower import Call, Tiling, lower
from longmesh.attention.kernel.scores import additive_mask
from longmesh.attention.merge import Partial, accumulate_dtype, empty_partial

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class CpuFlash(Kernel):
    """torch's fused CPU kernel on strips, in fp32 or fp64."""

    name = "cpu_flash"
    tiling = Tiling()

    def refuses(self, need: Need) -> str | None:
        if need.device != "cpu":
            return f"runs on cpu, not on {need.device}"
        if not need.dtype.is_floating_point or need.dtype.itemsize < 2:
            return f"takes fp64, fp32, bf16 and fp16, not {need.dtype}"
        if need.score_mod:
            return "has no score_mod"
        if need.dropout:
            return "has no dropout"
        if need.bias_grad:
            return "has no gradient for a bias"
        return None

    def forward(
        self,
        q_BHSD: Tensor,
        k_BGKD: Tensor,
        v_BGKE: Tensor,
        blocks: Sequence[Block],
        score: Score,
        where: Coordinates,
        state: Partial | None = None,
    ) -> Partial:
        B, H, S, D = q_BHSD.shape
        E = v_BGKE.shape[-1]
        calls = _calls(blocks, score)
        q, k, v = _operands(q_BHSD, k_BGKD, v_BGKE)
        scale = score.scale_for(D)
        masks = _Masks(score, where, (B, H), q)
        if state is None and len(calls) == 1 and calls[0].q_starts == (0,) and calls[0].rows == S:
            out, lse = _run(calls[0], q, k, v, masks.of(calls[0]), scale)
            return Partial(out[0, ..., :E].unflatten(0, (B, H)), lse[0].unflatten(0, (B, H)))
        fresh = state is None
        state = empty_partial(q_BHSD, E) if state is None else state
        out_XSE, lse_XS = state.out_BHSD.flatten(0, 1), state.lse_BHS.flatten(0, 1)
        assert out_XSE.data_ptr() == state.out_BHSD.data_ptr(), (
            "a partial result must fold into (B * H, S, E)"
        )
        for call in calls:
            out, lse = _run(call, q, k, v, masks.of(call), scale)
            rows = None if call.sizes is None else [size for size, _ in call.sizes]
            merge_tiles_(out_XSE, lse_XS, out[..., :E], lse, call.q_starts, rows, first=fresh and call.first)
        return state

    def backward(
        self,
        q_BHSD: Tensor,
        k_BGKD: Tensor,
        v_BGKE: Tensor,
        blocks: Sequence[Block],
        score: Score,
        where: Coordinates,
        final: Final,
        gradients: Gradients,
    ) -> None:
        calls = _calls(blocks, score)
        if not calls:
            return
        B, H, _, D = q_BHSD.shape
        E = v_BGKE.shape[-1]
        q, k, v = _operands(q_BHSD, k_BGKD, v_BGKE)
        out, dout = (_operand(t, q.shape[-1], q.dtype) for t in (final.out_BHSE, final.dout_BHSE))
        lse_XS = final.lse_BHS.flatten(0, 1)
        masks = _Masks(score, where, (B, H), q)
        dq, dk, dv = (fold_view(g) for g in (gradients.dq_BHSD, gradients.dk_BGKD, gradients.dv_BGKE))
        for call in calls:
            q_sizes, k_sizes = _sizes(call)
            rows = [read_tiles(t, call.q_starts, call.rows, q_sizes) for t in (dout, q, out)]
            keys = [read_tiles(t, call.k_starts, call.keys, k_sizes) for t in (k, v)]
            lse = read_tiles(lse_XS, call.q_starts, call.rows, q_sizes)
            tiles = _flash_backward(
                rows[0], rows[1], *keys, rows[2], lse, 0.0, call.causal,
                attn_mask=masks.of(call), scale=score.scale_for(D),
            )  # fmt: skip
            add_tiles_(dq, tiles[0][..., :D], call.q_starts, q_sizes)
            add_tiles_(dk, tiles[1][..., :D], call.k_starts, k_sizes)
            add_tiles_(dv, tiles[2][..., :E], call.k_starts, k_sizes)


def _calls(blocks: Sequence[Block], score: Score) -> tuple[Call, ...]:
    """The lowered blocks. A bias needs each tile's own positions, so its blocks are asked for one by one."""
    if score.bias is not None:
        blocks = [block._replace(elementwise=True) for block in blocks]
    return lower(tuple(blocks), CpuFlash.tiling)


def _operands(q_BHSD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor) -> list[Tensor]:
    """Folded to (X, rows, dim), upcast, and padded to one head dim."""
    width = max(q_BHSD.shape[-1], v_BGKE.shape[-1])
    return [_operand(t, width, accumulate_dtype(t.dtype)) for t in (q_BHSD, k_BGKD, v_BGKE)]


def _operand(tensor_BHSD: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    folded = fold_heads(tensor_BHSD.detach()).to(dtype)
    return F.pad(folded, (0, width - folded.shape[-1])) if folded.shape[-1] < width else folded


def _sizes(call: Call) -> tuple[list[int] | None, list[int] | None]:
    if call.sizes is None:
        return None, None
    return [rows for rows, _ in call.sizes], [keys for _, keys in call.sizes]


def _run(
    call: Call, q_XSD: Tensor, k_XKD: Tensor, v_XKD: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """One fused call: (N, X, L, D) outputs and (N, X, L) log-sum-exps."""
    q_sizes, k_sizes = _sizes(call)
    q = read_tiles(q_XSD, call.q_starts, call.rows, q_sizes)
    k = read_tiles(k_XKD, call.k_starts, call.keys, k_sizes)
    v = read_tiles(v_XKD, call.k_starts, call.keys, k_sizes)
    out, lse = _flash(q, k, v, 0.0, call.causal, attn_mask=mask, scale=scale)
    if call.elementwise and mask is not None:
        lse.masked_fill_((mask == -torch.inf).all(-1), -torch.inf)
    return out, lse


class _Masks:
    """The mask tensors of one stage's calls. Strips of one band share theirs."""

    def __init__(self, score: Score, where: Coordinates, heads: tuple[int, int], like: Tensor) -> None:
        self._score, self._where, self._heads, self._like = score, where, heads, like
        self._bands: dict[tuple, Tensor] = {}

    def of(self, call: Call) -> Tensor | None:
        if call.elementwise:
            mask = additive_mask(call, self._score, self._where, self._heads, self._like)
            return mask.expand(1, -1, call.rows, call.keys)
        if call.causal or (call.full and call.sizes is None):
            return None
        k_sizes = _sizes(call)[1]
        key = (call.rows, call.keys, call.lo, call.hi, tuple(k_sizes or ()))
        if key not in self._bands:
            args = (self._like.dtype, self._like.device)
            self._bands[key] = band_mask(call.rows, call.keys, call.lo, call.hi, k_sizes, *args)
        return self._bands[key].expand(len(call.q_starts), 1, call.rows, call.keys)
