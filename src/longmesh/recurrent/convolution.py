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

from longmesh._torch.first_derivative import refuse_second_derivative
from longmesh.comm import AxisGroup
from longmesh.comm.halo import Rows, add_rows, fetch_rows, return_rows
from longmesh.errors import LongmeshError
from longmesh.recurrent.chain import Chain
from longmesh.recurrent.kernel.convolution import Convolution


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
    if causal_conv1d_fn is None or x.shape[-1] == 0:
        out, last = _ConvolutionFunction.apply(chain, x, weight, bias, activation is not None, initial)
        kind = x.device.type
        if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:  # as torch's convolution
            out = out.to(torch.get_autocast_dtype(kind))
        return out, last
    width = weight.shape[-1]
    padded = with_tokens_before(chain, x, width - 1, initial)
    starts = chain.plan.marks_before(chain.rank, width - 1)
    # Documents are known for channels that lie next to each other only.
    given = padded if starts is None else padded.mT.contiguous().mT
    begun = None if starts is None else _begun(starts, x.device).to(torch.int32)
    numbers = None if begun is None else begun.expand(len(x), -1).contiguous()
    out = causal_conv1d_fn(given, weight, bias, seq_idx=numbers, activation=activation)
    last = padded[..., padded.shape[-1] - (width - 1) :]
    return out[..., width - 1 :], last * _ends_here(starts, width, last)


def _ends_here(starts: np.ndarray | None, width: int, like: Tensor) -> Tensor | int:
    """Of the last width - 1 tokens: 1 for those of the document that ends here, 0 for others."""
    if starts is None or width == 1:
        return 1
    begun = _begun(starts[:, -(width - 1) :], like.device)
    return (begun == begun[:, -1:]).to(like.dtype).unsqueeze(1)


class _ConvolutionFunction(torch.autograd.Function):
    """By our kernel. No copy of x is made to put the tokens before it; only they are fetched, and their gradients are
    added to those of x where they belong."""

    @staticmethod
    def forward(
        ctx: Any,
        chain: Chain,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        is_silu: bool,
        initial: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        width = weight.shape[-1]
        before = _before(chain, x, width - 1, initial)
        starts = chain.plan.marks_before(chain.rank, width - 1)
        last = torch.cat([before, x[..., max(0, x.shape[-1] - (width - 1)) :]], -1)
        last = last[..., last.shape[-1] - (width - 1) :] * _ends_here(starts, width, x)
        ctx.save_for_backward(x, before, weight, bias)
        ctx.chain, ctx.is_silu, ctx.starts = chain, is_silu, starts
        ctx.initial = None if initial is None else (initial.shape, initial.dtype)
        ctx.set_materialize_grads(False)
        return Convolution(x, before, weight, bias, is_silu, starts).outputs(), last

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        refuse_second_derivative("a convolution")
        x, before, weight, bias = ctx.saved_tensors
        grad_out, grad_last = gradients
        grad_out = torch.zeros_like(x) if grad_out is None else grad_out
        found = Convolution(x, before, weight, bias, ctx.is_silu, ctx.starts).differentiate(grad_out)
        if grad_last is not None:
            grad_last = grad_last * _ends_here(ctx.starts, weight.shape[-1], x)
            of_x = min(x.shape[-1], grad_last.shape[-1])
            of_before = grad_last.shape[-1] - of_x
            found.x[..., x.shape[-1] - of_x :] += grad_last[..., of_before:]
            found.before[..., before.shape[-1] - of_before :] += grad_last[..., :of_before]
        _return_before(ctx.chain, found.before, found.x)
        grad_bias = None if bias is None else found.bias.to(bias.dtype)
        grad_initial = None
        if ctx.initial is not None:
            shape, dtype = ctx.initial
            grad_initial = found.before.new_zeros(shape, dtype=dtype)
            given = grad_initial[..., min(ctx.chain.plan.span(ctx.chain.rank)[0], shape[-1]) :]
            given.copy_(found.before[..., : given.shape[-1]])
        return None, found.x, found.weight.to(weight.dtype), grad_bias, None, grad_initial


def _before(chain: Chain, x: Tensor, count: int, initial: Tensor | None) -> Tensor:
    """The `count` tokens before x, as `with_tokens_before` has them. Collective."""
    rows = _rows_before(chain, count)
    found = x[..., :0] if chain.group is None else fetch_rows(x, 2, *rows, chain.group)
    before = x.new_zeros((*x.shape[:-1], count))
    before[..., count - found.shape[-1] :] = found
    if initial is not None:
        given = initial[..., min(chain.plan.span(chain.rank)[0], count) :]
        before[..., : given.shape[-1]] = given
    return before


def _return_before(chain: Chain, grad_before: Tensor, grad_x: Tensor) -> None:
    """Add to `grad_x` what other ranks have for its tokens in their `grad_before`. Collective."""
    if chain.group is None:
        return
    have, need = _rows_before(chain, grad_before.shape[-1])
    first, after = need[chain.group.rank]
    fetched = grad_before[..., grad_before.shape[-1] - (after - first) :]
    add_rows(grad_x, fetched, 2, have, need, chain.group)


def _rows_before(chain: Chain, count: int) -> tuple[list[Rows], list[Rows]]:
    """What each member of the group has, and what of the `count` tokens before that its documents need."""
    have = [chain.plan.span(rank) for rank in chain.members]
    starts = [first for first, _ in have]
    return have, [
        (start - chain.plan.reach(rank, count), start)
        for rank, start in zip(chain.members, starts, strict=True)
    ]


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
    if chain.group is None:
        return x
    have, before = _rows_before(chain, count)
    need = [(first, stop) for (first, _), (_, stop) in zip(before, have, strict=True)]
    return _TokenHalo.apply(x, have, need, chain.group)  # type: ignore[return-value]


class _TokenHalo(torch.autograd.Function):
    """Something is kept and looked at in backward on every rank: where the part around is checkpointed, that makes all
    ranks compute it again, and before they exchange. A mask is kept only where a document begins."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, have: Sequence[Rows], need: Sequence[Rows], group: AxisGroup) -> Tensor:
        ctx.rows = (have, need, group)
        ctx.save_for_backward(x.new_empty(0))
        return fetch_rows(x, x.ndim - 1, have, need, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        assert len(ctx.saved_tensors) == 1
        return _HaloBack.apply(gradients[0], *ctx.rows), None, None, None


class _HaloBack(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gradient: Tensor, have: Sequence[Rows], need: Sequence[Rows], group: AxisGroup
    ) -> Tensor:
        ctx.rows = (have, need, group)
        ctx.save_for_backward(gradient.new_empty(0))
        return return_rows(gradient.contiguous(), gradient.ndim - 1, have, need, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        assert len(ctx.saved_tensors) == 1
        return _TokenHalo.apply(gradients[0].contiguous(), *ctx.rows), None, None, None
