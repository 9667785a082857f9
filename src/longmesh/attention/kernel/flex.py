"""FlexAttention, compiled, on CUDA: score_mod and mask_mod at the speed of a fused kernel.

Shapes: B batch, H query heads, G key/value heads, S query rows, K key rows, D head dim, E value head dim,
L rows of a tile.

NEVER COMPILED OR DIFFERENTIATED where this was written: there was no GPU, and FlexAttention has no
backward on CPU. Its forward is tested uncompiled, and its backward's formula with another kernel.

One call per block. The functions of the user see global indices: ours translate rows to positions.
The backward goes through FlexAttention's own autograd, which knows only this block's softmax, so the
gradient of the merged result is brought back to the block: with ``w = exp(lse_b - lse)``

    d out_b = w * dout          d lse_b = w * (sum(dout * out_b) - sum(dout * out))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from longmesh.attention.kernel.base import (
    AttentionGradients,
    Coordinates,
    Final,
    Kernel,
    KernelWork,
    Need,
    Score,
)
from longmesh.attention.kernel.lower import KernelTile, as_tile, coalesce
from longmesh.attention.kernel.merge import PartialResult, empty_partial, merge_
from longmesh.attention.mask.block import Block
from longmesh.attention.mods import captured_tensors


class Flex(Kernel):
    """FlexAttention. `compiled=False` runs it eagerly, which materialises the scores."""

    name = "flex"

    def __init__(self, compiled: bool = True) -> None:
        self.compiled = compiled

    def refuses(self, need: Need) -> str | None:
        if need.device != "cuda":
            return f"is differentiable only on cuda, not on {need.device}"
        if need.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"takes float32, bfloat16, float16, not {need.dtype}"
        if need.dropout:
            return "has no dropout that is independent of the layout"
        return "does not add a bias; read it in a score_mod" if need.bias else None

    def forward(self, work: KernelWork, state: PartialResult | None = None) -> PartialResult:
        q_BHSD, k_BGKD, v_BGKE, blocks, score, where = work
        state = empty_partial(q_BHSD, v_BGKE.shape[-1]) if state is None else state
        for tile in _tiles(blocks):
            rows = slice(tile.q, tile.q + tile.rows)
            with torch.no_grad():
                out, lse = self._attend(q_BHSD, k_BGKD, v_BGKE, tile, score, where)
                merge_(state.out_BHSD[:, :, rows], state.lse_BHS[:, :, rows], out, lse)
        return state

    def backward(self, work: KernelWork, final: Final, gradients: AttentionGradients) -> None:
        q_BHSD, k_BGKD, v_BGKE, blocks, score, where = work
        captured = captured_tensors(score.score_mod) if gradients.dcaptured else []
        for tile in _tiles(blocks):
            rows, keys = slice(tile.q, tile.q + tile.rows), slice(tile.k, tile.k + tile.keys)
            q, k, v = (t.detach().requires_grad_() for t in (q_BHSD, k_BGKD, v_BGKE))
            with torch.enable_grad():
                out, lse = self._attend(q, k, v, tile, score, where)
            seeds = partial_gradients(out.detach(), lse.detach(), final, rows)
            found = torch.autograd.grad(
                (out, lse),
                (q, k, v, *captured),
                (seeds[0].to(out.dtype), seeds[1].to(lse.dtype)),
                allow_unused=True,
            )
            gradients.dq_BHSD[:, :, rows] += found[0][:, :, rows]
            gradients.dk_BGKD[:, :, keys] += found[1][:, :, keys]
            gradients.dv_BGKE[:, :, keys] += found[2][:, :, keys]
            for total, grad in zip(gradients.dcaptured, found[3:], strict=True):
                if grad is not None:
                    total.add_(grad)

    def _attend(
        self,
        q_BHSD: Tensor,
        k_BGKD: Tensor,
        v_BGKE: Tensor,
        tile: KernelTile,
        score: Score,
        where: Coordinates,
    ) -> tuple[Tensor, Tensor]:
        """FlexAttention on one tile: output and log-sum-exp of its rows."""
        rows, keys = (tile.q, tile.q + tile.rows), (tile.k, tile.k + tile.keys)
        q, k, v = q_BHSD[:, :, slice(*rows)], k_BGKD[:, :, slice(*keys)], v_BGKE[:, :, slice(*keys)]
        score_mod, mask_mod = _local(tile, score, where, q.device)
        mask = create_block_mask(
            mask_mod,
            q.shape[0],
            q.shape[1],
            tile.rows,
            tile.keys,
            device=q.device.type,
            _compile=self.compiled,
        )
        attention = torch.compile(flex_attention) if self.compiled else flex_attention
        out, aux = attention(
            q, k, v, score_mod, mask, score.scale_for(q.shape[-1]), q.shape[1] != k.shape[1],
            return_aux=AuxRequest(lse=True),
        )  # fmt: skip
        assert aux.lse is not None
        return out, aux.lse


def partial_gradients(out_b: Tensor, lse_b: Tensor, final: Final, rows: slice) -> tuple[Tensor, Tensor]:
    """The gradients of one block's (out_b, lse_b), from the merged result's."""
    dout = final.dout_BHSE[:, :, rows]
    weight = torch.exp(lse_b - final.lse_BHS[:, :, rows])
    return weight[..., None] * dout, weight * ((dout * out_b).sum(-1) - final.delta_BHS[:, :, rows])


def _tiles(blocks: Sequence[Block]) -> list[KernelTile]:
    return [tile for block in coalesce(tuple(blocks)) for tile in as_tile(block)]


def _local(
    tile: KernelTile, score: Score, where: Coordinates, device: torch.device
) -> tuple[Callable[..., Tensor] | None, Callable[..., Tensor]]:
    """score_mod and mask_mod in a tile's own indices, asking the user's functions in global ones."""
    q_L = where.q_rows(tile.q, tile.q + tile.rows, device)
    k_M = where.k_rows(tile.k, tile.k + tile.keys, device)
    ask_score, ask_mask = score.score_mod, score.mask_mod

    def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert ask_score is not None
        return ask_score(s, b + where.batch_start, h + where.head_start, q_L[i], k_M[j])

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = (j - i >= tile.lo) & (j - i <= tile.hi)
        if tile.elementwise and ask_mask is not None:
            seen = seen & ask_mask(b + where.batch_start, h + where.head_start, q_L[i], k_M[j])
        return seen

    return (None if ask_score is None else score_mod), mask_mod
