"""Losses and log-probabilities of single tokens, whose logits are made again for the gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from longmesh._torch.first_derivative import without_second
from longmesh.tiles.arguments import head_of
from longmesh.tiles.head import Head, HeadGrads, no_second_derivative

_NAME = "token_logprobs"


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    mesh: DeviceMesh | None = None,
    tile: int | None = None,
) -> Tensor:
    """The log-probability of each label, as DPO and GRPO want it, with the logits of one tile of tokens in memory.

    Shaped as `labels`; 0 where a label is `ignore_index`. Arguments are those of `tiled_cross_entropy`. With `mesh` it
    is collective, and so is its backward.

    >>> _ = torch.manual_seed(0)
    >>> hidden, weight, labels = torch.randn(6, 4), torch.randn(9, 4), torch.arange(6)
    >>> found = token_logprobs(hidden, weight, labels)
    >>> torch.allclose(found, (hidden @ weight.T).log_softmax(-1).gather(1, labels[:, None])[:, 0], atol=1e-6)
    True
    """
    head, tokens, flat = head_of(
        _NAME,
        hidden,
        weight,
        labels,
        bias,
        mesh,
        ignore_index=ignore_index,
        softcap=softcap,
        tile=tile,
    )
    return -TokenLosses.apply(tokens, head.weight, head.bias, flat, head, _NAME).view(labels.shape)


class TokenLosses(torch.autograd.Function):
    """Each token's loss; backward makes the logits of each tile again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        head: Head,
        what: str,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, labels)
        ctx.head, ctx.what = head, what
        with torch.autocast(hidden.device.type, enabled=False):
            buffer = head.buffer(len(hidden))
            wide = torch.float64 if hidden.dtype is torch.float64 else torch.float32
            out = torch.empty(len(hidden), dtype=wide, device=hidden.device)
            for where in head.tiles(len(hidden)):
                out[where] = head.losses(hidden[where], labels[where], buffer)[0]
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, _, _, labels = ctx.saved_tensors
        head: Head = ctx.head
        with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
            buffer = head.buffer(len(hidden))
            sums = HeadGrads(head, hidden, ctx.needs_input_grad[:3])
            for where in head.tiles(len(hidden)):
                _, state = head.losses(hidden[where], labels[where], buffer)
                sums.add(where, hidden[where], head.logit_grads(state, grads[0][where]))
            found = sums.finish()
        return (*without_second(no_second_derivative(ctx.what), found), None, None, None)
