"""A causal depthwise convolution over a cut sequence: the last tokens of the rank before are fetched, no more.

    y_t = bias + sum_j weight[j] x_(t - width + 1 + j)       zeros before the first token of a document

A short span may need tokens of several ranks before it. What is fetched is what a document that goes on needs: a
rank that begins a document receives nothing.

Shapes: B batch, D channels, T tokens of this rank, as causal_conv1d has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from longmesh.comm import AxisGroup
from longmesh.comm.halo import Rows, fetch_rows, return_rows
from longmesh.errors import LongmeshError
from longmesh.recurrent.chain import Chain


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
    begun = documents_begun(chain, width - 1, x.device)
    if num_tokens == 0:  # the weights still get their gradients, of zero
        out = padded[..., :0] * weight[:, :1]
        out = out if bias is None else out + bias[:, None]
    elif causal_conv1d_fn is not None:
        # Documents are known for channels that lie next to each other only.
        given = padded if begun is None else padded.mT.contiguous().mT
        numbers = None if begun is None else begun.to(torch.int32).expand(len(x), -1).contiguous()
        return causal_conv1d_fn(given, weight, bias, seq_idx=numbers, activation=activation)[
            ..., width - 1 :
        ], _last(padded, begun, width)
    elif begun is None:
        out = torch.nn.functional.conv1d(padded, weight.unsqueeze(1), bias, groups=weight.shape[0])
    else:
        out = x.new_zeros(x.shape) if bias is None else bias[:, None].expand_as(x)
        for j in range(width):
            tokens = slice(j, j + num_tokens)
            same = (begun[:, tokens] == begun[:, width - 1 :]).to(x.dtype).unsqueeze(1)
            out = out + weight[:, j, None] * (padded[..., tokens] * same)
    return out if activation is None else torch.nn.functional.silu(out), _last(padded, begun, width)


def _last(padded: Tensor, begun: Tensor | None, width: int) -> Tensor:
    """The last width - 1 tokens, zeros before the document that ends here."""
    last = padded[..., padded.shape[-1] - (width - 1) :]
    if begun is None or width == 1:
        return last
    return last * (begun[:, -(width - 1) :] == begun[:, -1:]).to(padded.dtype).unsqueeze(1)


def shift(chain: Chain, x: Tensor) -> Tensor:
    """x (B, D, T): the token before each, zero where a document begins. Collective."""
    padded = with_tokens_before(chain, x, 1, None)[..., : x.shape[-1]]
    begun = documents_begun(chain, 1, x.device)
    if begun is None:
        return padded
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


def documents_begun(chain: Chain, count: int, device: torch.device) -> Tensor | None:
    """(rows, count + tokens): how many documents have begun up to each token and the `count` before; None if none."""
    marks = chain.plan.marks_before(chain.rank, count)
    return None if marks is None else torch.from_numpy(marks.cumsum(axis=1)).to(device)


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
        have, need, group = ctx.rows
        return (
            return_rows(gradients[0].contiguous(), gradients[0].ndim - 1, have, need, group),
            None,
            None,
            None,
        )
