"""A causal depthwise convolution over a cut sequence: the last tokens of the rank before are fetched, no more.

    y_t = bias + sum_j weight[j] x_(t - width + 1 + j)       zeros before the first token of a document

A short span may need tokens of several ranks before it. What is fetched is what a document that goes on needs: a
rank that begins a document receives nothing.

Shapes: B batch, D channels, T tokens of this rank, as causal_conv1d has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longmesh.comm import AxisGroup
from longmesh.comm.halo import Rows, fetch_rows, return_rows
from longmesh.errors import LongmeshError
from longmesh.recurrent.chain import Chain
from longmesh.recurrent.kernel.convolution import convolve_tiles


def convolve(
    chain: Chain,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    initial: Tensor | None = None,
    causal_conv1d_fn: Callable[..., Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """x (B, D, T), weight (D, width): the same shape as x, and the last tokens, (B, D, width - 1). Collective.

    `causal_conv1d_fn`: of the package of that name, if it is to compute.
    """
    if activation not in (None, "silu", "swish"):
        raise LongmeshError(f"causal_conv1d(activation={activation!r}): give None, 'silu' or 'swish'")
    width, num_tokens = weight.shape[-1], x.shape[-1]
    padded = with_tokens_before(chain, x, width - 1, initial)
    starts = chain.plan.marks_before(chain.rank, width - 1)
    last = _last(padded, starts, width)
    if causal_conv1d_fn is None or num_tokens == 0:
        return convolve_tiles(padded, weight, bias, activation is not None, starts), last
    # Documents are known for channels that lie next to each other only.
    given = padded if starts is None else padded.mT.contiguous().mT
    begun = None if starts is None else _begun(starts, x.device).to(torch.int32)
    numbers = None if begun is None else begun.expand(len(x), -1).contiguous()
    out = causal_conv1d_fn(given, weight, bias, seq_idx=numbers, activation=activation)
    return out[..., width - 1 :], last


def _last(padded: Tensor, starts: np.ndarray | None, width: int) -> Tensor:
    """The last width - 1 tokens, zeros before the document that ends here."""
    last = padded[..., padded.shape[-1] - (width - 1) :]
    if starts is None or width == 1:
        return last
    begun = _begun(starts[:, -(width - 1) :], padded.device)
    return last * (begun == begun[:, -1:]).to(padded.dtype).unsqueeze(1)


def shift(chain: Chain, x: Tensor) -> Tensor:
    """x (B, D, T): the token before each, zero where a document begins. Collective."""
    padded = with_tokens_before(chain, x, 1, None)[..., : x.shape[-1]]
    starts = chain.plan.marks_before(chain.rank, 1)
    if starts is None:
        return padded
    begun = _begun(starts, x.device)
    return padded * (begun[:, :-1] == begun[:, 1:]).to(x.dtype).unsqueeze(1)


def with_tokens_before(chain: Chain, x: Tensor, count: int, initial: Tensor | None) -> Tensor:
    """x with `count` tokens before it: of its documents, `initial` before the first, else zeros. Collective."""
    start, stop = chain.plan.span(chain.rank)
    found = _fetch(chain, x, count)
    missing = count + stop - start - found.shape[-1]
    if initial is None:
        return torch.nn.functional.pad(found, (missing, 0))
    # Position p < 0 is column count + p of `initial`; between it and what was found are other documents.
    given = initial[..., min(start, count) :].to(x.dtype)  # perhaps none of it: it still gets a gradient
    return torch.cat([given, torch.nn.functional.pad(found, (missing - given.shape[-1], 0))], -1)


def _begun(starts: np.ndarray, device: torch.device) -> Tensor:
    """How many documents have begun up to each token."""
    return torch.from_numpy(starts.cumsum(axis=1)).to(device)


def _fetch(chain: Chain, x: Tensor, count: int) -> Tensor:
    """x with those of the `count` tokens before it that its documents need."""
    plan = chain.plan
    if chain.group is None:
        return x
    have = [plan.span(rank) for rank in chain.members]
    need = [
        (start - plan.reach(rank, count), stop)
        for rank, (start, stop) in zip(chain.members, have, strict=True)
    ]
    return _Halo.apply(x, have, need, chain.group)  # type: ignore[return-value]


class _Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, have: Sequence[Rows], need: Sequence[Rows], group: AxisGroup) -> Tensor:
        ctx.rows = (have, need, group)
        return fetch_rows(x, x.ndim - 1, have, need, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _HaloBack.apply(gradients[0], *ctx.rows), None, None, None


class _HaloBack(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gradient: Tensor, have: Sequence[Rows], need: Sequence[Rows], group: AxisGroup
    ) -> Tensor:
        ctx.rows = (have, need, group)
        return return_rows(gradient.contiguous(), gradient.ndim - 1, have, need, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _Halo.apply(gradients[0].contiguous(), *ctx.rows), None, None, None
