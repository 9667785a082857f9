"""A causal depthwise convolution of tokens that are here, a tile of them at a time.

    y_t = bias + sum_j weight[j] x_(t - width + 1 + j)         `before` holds the width - 1 tokens before x's first

torch's own convolution takes four times as long per token once a sequence outgrows the caches. Here all that is done to
a tile happens while it is in one, and nothing of the sequence's size is made but the results. A tile has long rows of
what lies next to each other in memory, tokens or channels: short ones are a page and a set of cache lines each.

Shapes: B batch, D channels, T tokens. Computed in fp32, or in float64 if that is what x has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import silu

TILE_NUMEL = 1 << 18  # 1 MiB in fp32: half of a core's second cache
ROW_TOKENS = 4096


class ConvolutionGradients(NamedTuple):
    """Of x, of the tokens before it, of weight and of bias; the last two in the type that is computed in."""

    x: Tensor
    before: Tensor
    weight: Tensor
    bias: Tensor


@dataclass(frozen=True, eq=False)
class Convolution:
    """x (B, D, T), before (B, D, width - 1), weight (D, width), bias (D,).

    `starts` (B or 1, width - 1 + T): whether a document begins at a token of `before` or x; None: one document.
    """

    x: Tensor
    before: Tensor
    weight: Tensor
    bias: Tensor | None
    is_silu: bool
    starts: np.ndarray | None

    @property
    def width(self) -> int:
        return self.weight.shape[-1]

    def outputs(self) -> Tensor:
        out = torch.empty_like(self.x)
        for channels in self._channels():
            for tokens, begun in self._tokens():
                tile = self._tile(channels, tokens, begun)
                here = out[:, channels, tokens]
                found = tile.products(here if out.dtype == tile.x.dtype else None)
                found = silu(found, inplace=True) if self.is_silu else found
                if found is not here:
                    here.copy_(found)
        return out

    def differentiate(self, gradient: Tensor) -> ConvolutionGradients:
        """Tiles are computed again instead of keeping what the activation was given."""
        wide = torch.promote_types(self.x.dtype, torch.float32)
        found = ConvolutionGradients(
            torch.empty_like(self.x),
            torch.empty_like(self.before),
            torch.zeros_like(self.weight, dtype=wide),
            self.weight.new_zeros(len(self.weight), dtype=wide),
        )
        num_tokens, over = self.x.shape[-1], self.width - 1
        for channels in self._channels():
            # The last tokens of a tile are read by the next one, too.
            carried = self.before.new_zeros(self.before[:, channels].shape, dtype=wide)
            for tokens, begun in self._tokens():
                tile = self._tile(channels, tokens, begun)
                grad = gradient[:, channels, tokens].to(wide)
                if self.is_silu:
                    grad = torch.ops.aten.silu_backward(grad, tile.products(None))
                grad_x = tile.transposed(grad, found.weight[channels])
                grad_x[..., :over] += carried
                found.bias[channels] += grad.sum((0, -1))
                self._write(found, channels, tokens.start, grad_x[..., : tokens.stop - tokens.start])
                carried = grad_x[..., tokens.stop - tokens.start :]
            self._write(found, channels, num_tokens, carried)
        return found

    def _write(self, found: ConvolutionGradients, channels: slice, start: int, values: Tensor) -> None:
        """Values of tokens from `start`, counted from the first of `before`."""
        split = min(max(0, self.width - 1 - start), values.shape[-1])
        stop = start + values.shape[-1]
        if split:
            found.before[:, channels, start : start + split] = values[..., :split]
        found.x[:, channels, start + split - (self.width - 1) : stop - (self.width - 1)] = values[..., split:]

    def _tile(self, channels: slice, tokens: slice, begun: Tensor | None) -> _ChannelTile:
        first = tokens.start - (self.width - 1)
        if first >= 0:
            x = self.x[:, channels, first : tokens.stop]
        else:
            before = self.before[:, channels, tokens.start :]
            x = torch.cat([before, self.x[:, channels, : tokens.stop]], -1)
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        bias = None if self.bias is None else self.bias[channels].to(x.dtype).unsqueeze(-1)
        return _ChannelTile(x, self.weight[channels].to(x.dtype), bias, begun)

    def _sizes(self) -> tuple[int, int]:
        """Channels and tokens of a tile; on a device all of them, since there a launch costs more than memory."""
        batch, channels, tokens = (max(1, n) for n in self.x.shape)
        if self.x.device.type != "cpu":
            return channels, tokens
        if self.x.stride(1) < self.x.stride(2):
            return channels, max(64, TILE_NUMEL // (batch * channels))
        tokens = min(tokens, ROW_TOKENS)
        return max(1, TILE_NUMEL // (batch * tokens)), tokens

    def _channels(self) -> Iterator[slice]:
        return _slices(self.x.shape[1], self._sizes()[0])

    def _tokens(self) -> Iterator[tuple[slice, Tensor | None]]:
        """Tokens of y, and how many documents have begun at those of x that they need, if any does."""
        for tokens in _slices(self.x.shape[2], self._sizes()[1]):
            begun = None
            if self.starts is not None:
                here = self.starts[:, tokens.start : tokens.stop + self.width - 1]
                if here[:, 1:].any():
                    begun = torch.from_numpy(here.cumsum(axis=1)).to(self.x.device)
            yield tokens, begun


def _slices(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(count, start + size)) for start in range(0, count, size))


@dataclass(frozen=True, eq=False)
class _ChannelTile:
    """x has width - 1 tokens more than y, before its first."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    begun: Tensor | None

    def _tap(self, x: Tensor, j: int) -> Tensor:
        """Those tokens that tap j reads."""
        return x[..., j : x.shape[-1] - (self.weight.shape[1] - 1 - j)]

    def _masked(self, tensor: Tensor, j: int) -> Tensor:
        """`tensor`, with zeros for those tokens of y whose document began after their token of tap j."""
        last = self.weight.shape[1] - 1
        if self.begun is None or j == last:
            return tensor
        same = self._tap(self.begun, j) == self._tap(self.begun, last)
        return tensor * same.to(tensor.dtype).unsqueeze(1)

    def products(self, out: Tensor | None) -> Tensor:
        """y before its activation, in `out` if that is given."""
        taps = self.weight.split(1, dim=1)
        out = torch.mul(self._masked(self._tap(self.x, 0), 0), taps[0], out=out)
        for j, weight in enumerate(taps[1:], 1):
            out.addcmul_(self._masked(self._tap(self.x, j), j), weight)
        return out if self.bias is None else out.add_(self.bias)

    def transposed(self, grad: Tensor, grad_weight: Tensor) -> Tensor:
        """The gradient of x, from that of `products`; that of the weights is added to `grad_weight`."""
        grad_x = torch.zeros_like(self.x)
        for j, weight in enumerate(self.weight.split(1, dim=1)):
            mine = self._masked(grad, j)
            self._tap(grad_x, j).addcmul_(mine, weight)
            grad_weight[:, j] += (mine * self._tap(self.x, j)).sum((0, -1))
        return grad_x
