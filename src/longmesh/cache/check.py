"""Checks of a step's calls: shapes before anything is sent, and whether all ranks were given the same tokens."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from longmesh.cache.bookkeeping import is_whole
from longmesh.errors import LongmeshError

if TYPE_CHECKING:
    from longmesh.cache.step import PoolStep


class AttendSignature(NamedTuple):
    """What must be the same on every rank in a layer's attention; lengths are the sequences'."""

    layer: int
    lengths: tuple[int, ...]
    new: tuple[int, ...]
    heads: tuple[int, ...]  # of q: how many, and their dim
    v_head_dim: int
    dtype: str
    window: int | None
    softcap: float | None
    scale: float | None
    has_sinks: bool
    cluster: str


def signature_of(
    step: PoolStep, layer: int, q: Tensor, v_head_dim: int, window: int | None, sinks: Tensor | None,
    softcap: float | None, scale: float | None,
) -> AttendSignature:  # fmt: skip
    """Of a call of `PoolStep.attend` that is in order."""
    return AttendSignature(
        layer, tuple(step.plan.stops), tuple(step.plan.counts), tuple(q.shape[1:]), v_head_dim, str(q.dtype), window,
        softcap, scale, sinks is not None, step.machine,
    )  # fmt: skip


def check_attend(
    step: PoolStep,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    sinks: Tensor | None,
    softcap: float | None,
    scale: float | None,
) -> None:
    """Raise if these can't be a step's queries, keys and values."""
    rows = len(step.rows)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor) or tensor.ndim != 3 or tensor.shape[0] != rows:
            given = f"shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else repr(tensor)
            raise LongmeshError(
                f"attend: {name} has {given}; this step has {rows} tokens here, so give ({rows}, heads, head dim)"
            )
    if q.shape[2] != k.shape[2] or k.shape[1] != v.shape[1] or not k.shape[1] or q.shape[1] % k.shape[1]:
        raise LongmeshError(
            f"attend: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: q and k must have one head dim, "
            "k and v one number of heads, and the heads of q be a multiple of it"
        )
    if q.dtype != k.dtype:
        raise LongmeshError(f"attend: q is {q.dtype} and k {k.dtype}; give both in one dtype")
    check_mask(window, sinks, q.shape[1])
    if softcap is not None and not softcap > 0:
        raise LongmeshError(
            f"attend: softcap={softcap}; scores are divided by it, so give more than 0, or None"
        )
    if scale is not None and not (isinstance(scale, int | float) and math.isfinite(scale)):
        raise LongmeshError(f"attend: scale={scale!r}; give a number, or None for 1 / sqrt(head dim)")


def check_open(step: PoolStep) -> None:
    """Raise if the step has ended: its pages may be another sequence's by now."""
    if not step.is_open:
        raise LongmeshError("this step was committed before; make the next one with pool.step()")


def check_window(window: int | None, most: int | None) -> None:
    """Raise if a pool that keeps `most` tokens is asked for more."""
    if most is not None and (window is None or window > most):
        raise LongmeshError(
            f"attend: window={window}, of a pool that was made with window={most} and gives older pages back; give "
            f"window={most} or less, or make the pool without one"
        )


def check_mask(window: int | None, sinks: Tensor | None, num_heads: int) -> None:
    if window is not None and (not is_whole(window) or window < 1):
        raise LongmeshError(
            f"attend: window={window}; a query sees itself at least, so give a whole number, 1 or more, or None"
        )
    if sinks is not None and (not isinstance(sinks, Tensor) or tuple(sinks.shape) != (num_heads,)):
        given = f"of shape {tuple(sinks.shape)}" if isinstance(sinks, Tensor) else repr(sinks)
        raise LongmeshError(
            f"attend: sinks {given}; give a tensor of one logit per query head, ({num_heads},)"
        )


def digest_of(*tensors: Tensor, besides: bytes = b"") -> int:
    """A number below 2 ** 56 that is the same for the same bits of tensors of one dtype."""
    digest = hashlib.blake2b(besides, digest_size=7)
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).cpu()
    digest.update(flat.view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest(), "big")


def refuse_differences(told: list[list[int]]) -> None:
    """Raise, on all ranks, if their digests or the states of their generators differ."""
    if len(told) < 2:
        return
    for rank, (digest, state) in enumerate(told):
        if digest != told[0][0]:
            raise LongmeshError(
                f"the ranks have diverged: rank {rank} was given other new tokens than rank 0, or has other weights; "
                "every rank must run the same model on the same tokens, and sample alike (torch.manual_seed)"
            )
        if state != told[0][1]:
            raise LongmeshError(
                f"the random generators of rank {rank} and rank 0 are in different states, so that they would sample "
                "different tokens; call torch.manual_seed(seed) with the same seed on every rank before the first step"
            )


class _ForwardOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, *inputs: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise LongmeshError(
            "attention over a sharded cache has no gradient; run the model under torch.no_grad(), or train it without "
            "a cache"
        )


def forward_only(out: Tensor, *inputs: Tensor) -> Tensor:
    """`out`, whose backward is an error if some input needs a gradient."""
    return _ForwardOnly.apply(out, *inputs) if torch.is_grad_enabled() else out
