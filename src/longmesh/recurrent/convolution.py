"""A causal depthwise convolution over a cut sequence: the last tokens of the rank before are fetched, no more.

    y_t = bias + sum_j weight[j] x_(t - width + 1 + j)       zeros before the first token of a document

A short span may need tokens of several ranks before it. What is fetched is what a document that goes on needs: a
rank that begins a document receives nothing.

Shapes: B batch, D channels, T tokens of this rank, as causal_conv1d has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from longmesh.comm import AxisGroup
from longmesh.comm.halo import Rows, fetch_rows, return_rows
from longmesh.errors import LongmeshError
from longmesh.recurrent.chain import Chain


def convolve(chain: Chain, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """x (B, D, T), weight (D, width): the same shape as x. Collective."""
    width = weight.shape[-1]
    start, stop = chain.plan.span(chain.rank)
    reach = chain.plan.reach(chain.rank, width - 1)
    padded = _fetch(chain, x, width)
    if start == stop:  # no token; the weights still get their gradients, of zero
        empty = padded * weight[:, :1]
        return empty if bias is None else empty + bias[:, None]
    padded = torch.nn.functional.pad(padded, (width - 1 - reach, 0))
    marks = chain.plan.marks_before(chain.rank, width - 1)
    if marks is None:
        out = torch.nn.functional.conv1d(padded, weight.unsqueeze(1), bias, groups=weight.shape[0])
    else:
        begun = torch.from_numpy(marks.cumsum(axis=1)).to(x.device)  # documents begun up to each token
        out = x.new_zeros(x.shape) if bias is None else bias[:, None].expand_as(x)
        for j in range(width):
            tokens = slice(j, j + stop - start)
            same = (begun[:, tokens] == begun[:, width - 1 :]).to(x.dtype).unsqueeze(1)
            out = out + weight[:, j, None] * (padded[..., tokens] * same)
    if activation is None:
        return out
    if activation in ("silu", "swish"):
        return torch.nn.functional.silu(out)
    raise LongmeshError(f"causal_conv1d(activation={activation!r}): give None, 'silu' or 'swish'")


def _fetch(chain: Chain, x: Tensor, width: int) -> Tensor:
    """x with the tokens before it that its documents need."""
    plan = chain.plan
    if chain.group is None:
        return x
    have = [plan.span(rank) for rank in chain.members]
    need = [
        (start - plan.reach(rank, width - 1), stop)
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
        have, need, group = ctx.rows
        return (
            return_rows(gradients[0].contiguous(), gradients[0].ndim - 1, have, need, group),
            None,
            None,
            None,
        )
