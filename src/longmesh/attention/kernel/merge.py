"""Merging partial attention results: two softmaxes over disjoint keys become the one over their union.

Shapes: B batch, H query heads, S query rows, D value head dim.

A partial result is the normalised output of a query row over some keys, and the logarithm of its
denominator (lse). With ``w = sigmoid(lse_b - lse)``

    out <- out + w * (out_b - out)        lse <- log(exp(lse) + exp(lse_b))

The pitfall is the row that has seen nothing: out 0 and lse -inf. Against another such row the
weight is NaN (-inf - -inf), which is why it is replaced by 0. Everything is kept in fp32 (fp64 for
fp64 inputs) until the last merge, so the error does not grow with the number of merges.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class PartialResult(NamedTuple):
    """The running result of one rank's queries: updated in place, stage after stage."""

    out_BHSD: Tensor
    lse_BHS: Tensor


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of partial results, log-sum-exps and gradients for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def blank_partial(q_BHSD: Tensor, v_head_dim: int) -> PartialResult:
    """A result to be written: it holds no numbers yet. Rows are outermost in memory, as in the CPU kernel's."""
    B, H, S, _ = q_BHSD.shape
    dtype = accumulate_dtype(q_BHSD.dtype)
    out_SBHD = torch.empty((S, B, H, v_head_dim), dtype=dtype, device=q_BHSD.device)
    lse_SBH = torch.empty((S, B, H), dtype=dtype, device=q_BHSD.device)
    return PartialResult(out_SBHD.permute(1, 2, 0, 3), lse_SBH.permute(1, 2, 0))


def empty_partial(q_BHSD: Tensor, v_head_dim: int) -> PartialResult:
    """The result of having seen no key: 0 and -inf."""
    partial = blank_partial(q_BHSD, v_head_dim)
    partial.out_BHSD.zero_()
    partial.lse_BHS.fill_(-torch.inf)
    return partial


def merge_(out: Tensor, lse: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    """Merges (out_b, lse_b) into (out, lse) in place. `out` has one dim more than `lse`, at the end."""
    weight = torch.sigmoid(lse_b - lse).nan_to_num_(nan=0.0)
    out.lerp_(out_b.to(out.dtype), weight.unsqueeze(-1))
    torch.logaddexp(lse, lse_b.to(lse.dtype), out=lse)


def apply_sinks(state: PartialResult, sinks_H: Tensor) -> PartialResult:
    """Adds one logit per head to every row's denominator (its value is 0). Once, after the last merge.

    The new log-sum-exp is also the one the backward needs: each block's probabilities come out with
    the sink in their denominator.
    """
    out, lse = state
    sink_H1 = sinks_H.detach().to(lse.dtype).unsqueeze(-1)
    out.mul_(torch.sigmoid(lse - sink_H1).unsqueeze(-1))
    torch.logaddexp(lse, sink_H1.expand_as(lse), out=lse)
    return state


def sinks_gradient(sinks_H: Tensor, lse_BHS: Tensor, delta_BHS: Tensor) -> Tensor:
    """d loss / d sinks of these rows: minus the sink's probability times delta (= sum of dout * out)."""
    sink_H1 = sinks_H.detach().to(lse_BHS.dtype).unsqueeze(-1)
    return -(torch.exp(sink_H1 - lse_BHS) * delta_BHS).sum(dim=(0, 2)).to(sinks_H.dtype)
