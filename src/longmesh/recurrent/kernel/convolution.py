"""A causal depthwise convolution of tokens that are here, a tile of them at a time.

    y_t = bias + sum_j weight[j] x_(t + j)         x has width - 1 tokens more than y, before its first

torch's own convolution takes four times as long per token once a sequence outgrows the caches. Here all that is done to
a tile happens while it is in one; backward computes the tile again instead of keeping what the activation was given.
Shapes: B batch, D channels, T tokens. Computed in fp32, or in float64 if that is what x has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import silu

from longmesh.errors import LongmeshError

TILE_NUMEL = 1 << 18  # 1 MiB in fp32: half of a core's second cache


def convolve_tiles(
    x: Tensor, weight: Tensor, bias: Tensor | None, is_silu: bool, starts: np.ndarray | None
) -> Tensor:
    """x (B, D, width - 1 + T), weight (D, width): (B, D, T), in the element type that torch's convolution would give.

    `starts` (B or 1, width - 1 + T): whether a document begins at a token of x; None: one document.
    """
    out = _Convolution.apply(x, weight, bias, is_silu, starts)
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        return out.to(torch.get_autocast_dtype(kind))  # type: ignore[union-attr]
    return out  # type: ignore[return-value]


def _tiles(x: Tensor, width: int) -> Iterator[slice]:
    """The tokens of y in stretches; on a device in one, since there a launch costs more than memory."""
    num_tokens = x.shape[-1] - (width - 1)
    numel = max(1, x.shape[0] * x.shape[1])
    size = max(64, TILE_NUMEL // numel) if x.device.type == "cpu" else max(1, num_tokens)
    for start in range(0, num_tokens, size):
        yield slice(start, min(num_tokens, start + size))


class _Tile:
    """One tile: its tokens of x for each tap, in the type that is computed in, zero if of another document."""

    def __init__(self, x: Tensor, width: int, tokens: slice, starts: np.ndarray | None) -> None:
        self.wide = torch.promote_types(x.dtype, torch.float32)
        self._x = x[..., tokens.start : tokens.stop + width - 1].to(self.wide)
        self._num_tokens, self._width = tokens.stop - tokens.start, width
        self._begun = None
        if starts is not None:
            here = starts[:, tokens.start : tokens.stop + width - 1]
            if here[:, 1:].any():
                self._begun = torch.from_numpy(here.cumsum(axis=1)).to(x.device)

    def tap(self, j: int) -> Tensor:
        return self._x[..., j : j + self._num_tokens]

    def masked(self, tensor: Tensor, j: int) -> Tensor:
        """`tensor`, with zeros for those tokens of y whose document began after their token of tap j."""
        if self._begun is None or j == self._width - 1:
            return tensor
        same = self._begun[:, j : j + self._num_tokens] == self._begun[:, self._width - 1 :]
        return tensor * same.to(self.wide).unsqueeze(1)

    def products(self, taps: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        """y before its activation."""
        out = self.masked(self.tap(0), 0) * taps[0]
        for j in range(1, self._width):
            out.addcmul_(self.masked(self.tap(j), j), taps[j])
        return out if bias is None else out.add_(bias.to(self.wide).unsqueeze(-1))


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, is_silu: bool, starts: np.ndarray | None
    ) -> Tensor:
        width = weight.shape[-1]
        out = x.new_empty(*x.shape[:-1], x.shape[-1] - (width - 1))
        taps = _taps(weight, x.dtype)
        for tokens in _tiles(x, width):
            found = _Tile(x, width, tokens, starts).products(taps, bias)
            out[..., tokens] = silu(found, inplace=True) if is_silu else found
        ctx.save_for_backward(x, weight, bias)
        ctx.is_silu, ctx.starts = is_silu, starts
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise LongmeshError(
                "a second derivative through a convolution over a cut sequence is not supported; call backward() or "
                "autograd.grad() without create_graph=True"
            )
        x, weight, bias = ctx.saved_tensors
        width = weight.shape[-1]
        taps = _taps(weight, x.dtype)
        wide = taps[0].dtype
        grad_x = torch.empty_like(x, dtype=wide)
        grad_x[..., : width - 1] = 0
        grad_weight, grad_bias = (
            torch.zeros_like(weight, dtype=wide),
            weight.new_zeros(len(weight), dtype=wide),
        )
        for tokens in _tiles(x, width):
            tile = _Tile(x, width, tokens, ctx.starts)
            grad = gradients[0][..., tokens].to(wide)
            if ctx.is_silu:
                grad = torch.ops.aten.silu_backward(grad, tile.products(taps, bias))
            grad_x[..., tokens.start + width - 1 : tokens.stop + width - 1] = 0
            for j in range(width):
                mine = tile.masked(grad, j)
                grad_x[..., tokens.start + j : tokens.stop + j].addcmul_(mine, taps[j])
                grad_weight[:, j] += (mine * tile.tap(j)).sum((0, -1))
            grad_bias += grad.sum((0, -1))
        return (
            grad_x.to(x.dtype),
            grad_weight.to(weight.dtype),
            None if bias is None else grad_bias.to(bias.dtype),
            None,
            None,
        )


def _taps(weight: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """The weights of each tap, (D, 1)."""
    return list(weight.to(torch.promote_types(dtype, torch.float32)).split(1, dim=1))
