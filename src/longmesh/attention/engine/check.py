"""What a call's tensors must be, checked on each rank, and the signature that all ranks must have in common.

These checks are local: `agree` makes what one rank finds an error of all.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longmesh.attention.kernel.base import Score
from longmesh.attention.mods import captured_tensors
from longmesh.attention.plan.attention_plan import AttentionPlan
from longmesh.errors import LongmeshError


class CallSignature(NamedTuple):
    """What must be the same on every rank: no local length. `backward`: whether gradients will be asked for."""

    plan: str
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    device: str
    scale: float | None
    score_mod: bool
    bias: tuple[int, ...] | None
    sinks: bool
    dropout: tuple[float, int | None]
    backward: bool
    lse: bool


class Gathered(NamedTuple):
    """What every rank must pass the same to `unshard` or `unshard_kv`."""

    what: str
    plan: str
    dim: int
    other_sizes: tuple[int, ...]
    dtype: torch.dtype


def check_tokens(what: str, tensor: Tensor, dim: int, tokens: int, num_cuts: int) -> int:
    """The dim counted from the front, if it has the tokens that the layout wants."""
    if not -tensor.ndim <= dim < tensor.ndim:
        raise LongmeshError(f"{what}(dim={dim}): the tensor {tuple(tensor.shape)} has {tensor.ndim} dims")
    dim %= tensor.ndim
    whose = "this rank's part" if what.startswith("un") else "the sequence"
    noun = "keys" if what.endswith("_kv") else "tokens"
    if tensor.shape[dim] != tokens:
        raise LongmeshError(
            f"{what}(dim={dim}): the tensor is {tuple(tensor.shape)}, but {whose} has {tokens} {noun}; "
            f"give the dim that holds the {noun}"
        )
    if num_cuts > 1 and (dim == 0 or tensor.shape[0] != num_cuts):
        raise LongmeshError(
            f"{what}(dim={dim}): the layout cuts {num_cuts} batch rows differently, so dim 0 must be the batch "
            f"of {num_cuts}; the tensor is {tuple(tensor.shape)}"
        )
    return dim


def raise_found(error: LongmeshError) -> CallSignature:
    """A check that finds what was found before."""
    raise error


def check_call(
    plan: AttentionPlan, tokens: tuple[int, int], q: Tensor, k: Tensor, v: Tensor | None, sinks: Tensor | None,
    score: Score,
) -> None:  # fmt: skip
    """Raise unless q, k, v and the options are what the plan can take. `tokens`: queries and keys of this rank."""
    v = _checked_values(plan, q, k, v)
    if not q.ndim == k.ndim == v.ndim == 4:
        raise LongmeshError(f"attention takes (batch, heads, tokens, head dim), given {_shapes(q, k, v)}")
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        kinds = ", ".join(f"{name} {t.dtype} on {t.device}" for name, t in zip("qkv", (q, k, v), strict=True))
        raise LongmeshError(f"q, k and v must have one dtype and one device, given {kinds}; use .to(q)")
    B, H, _, D = q.shape
    _check_lengths(plan, tokens, q, k, v)
    if k.shape[0] != B or k.shape[:3] != v.shape[:3] or k.shape[3] != D:
        raise LongmeshError(
            "q and k must have one batch and head dim, k and v one batch and number of heads; "
            f"given {_shapes(q, k, v)}"
        )
    if k.shape[1] < 1 or H % k.shape[1]:
        raise LongmeshError(
            f"{k.shape[1]} key heads do not divide {H} query heads ({_shapes(q, k, v)}); "
            "each key head serves the same number of query heads"
        )
    if len(plan.rows) > 1 and len(plan.rows) != B:
        raise LongmeshError(
            f"the mask has {len(plan.rows)} batch rows, q has a batch of {B}; give one list of lengths "
            "for all rows, or one for each"
        )
    _check_options(plan, q, sinks, score)


def _checked_values(plan: AttentionPlan, q: object, k: object, v: Tensor | None) -> Tensor:
    """The values, which may be a part of the keys; all are tensors."""
    inside = plan.heads.v_in_k
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor) and not (inside and tensor is v):
            raise LongmeshError(
                f"attention takes tensors (batch, heads, tokens, head dim), given {name}={type(tensor).__name__}; pass "
                "q, k and v, all three; or make the plan with v_in_k=True, where values are a part of the keys"
            )
    if not inside:
        assert isinstance(v, Tensor)
        return v
    if v is not None:
        raise LongmeshError(
            f"v_in_k: the values are the first {plan.heads.v_head_dim} features of the keys, so pass q and k only; "
            f"given v {tuple(v.shape)}"
        )
    assert isinstance(k, Tensor)
    if k.shape[-1] < plan.heads.v_head_dim:
        raise LongmeshError(
            f"v_in_k: the values are the first {plan.heads.v_head_dim} features of the keys, given k {tuple(k.shape)}; "
            "make the plan with the v_head_dim= of these"
        )
    return k[..., : plan.heads.v_head_dim]


def _check_lengths(plan: AttentionPlan, tokens: tuple[int, int], q: Tensor, k: Tensor, v: Tensor) -> None:
    if (q.shape[2], k.shape[2], v.shape[2]) == (tokens[0], tokens[1], tokens[1]):
        return
    if plan.kv_layout is None:
        raise LongmeshError(
            f"this rank has {tokens[0]} of the layout's {plan.seq_len} tokens, given {_shapes(q, k, v)}; "
            "cut the input with shard(x, dim), which gives each rank its tokens in the layout's order"
        )
    raise LongmeshError(
        f"this rank has {tokens[0]} of {plan.seq_len} queries and {tokens[1]} of {plan.kv_len} keys, given "
        f"{_shapes(q, k, v)}; cut queries with shard(x, dim) and keys with shard_kv(x, dim)"
    )


def signature_of(
    plan: AttentionPlan,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    sinks: Tensor | None,
    score: Score,
    lse: bool = False,
) -> CallSignature:
    """What this call must have in common with those of the other ranks. `lse`: whether it is also returned."""
    bias = score.bias
    given = [t for t in (q, k, v, sinks, bias) if t is not None]
    backward = torch.is_grad_enabled() and (
        any(t.requires_grad for t in given) or bool(captured_tensors(score.score_mod))
    )
    return CallSignature(
        plan=plan.digest,
        batch=q.shape[0],
        heads=q.shape[1],
        kv_heads=k.shape[1],
        head_dim=q.shape[3],
        v_head_dim=plan.heads.v_head_dim if v is None else v.shape[3],
        dtype=q.dtype,
        device=q.device.type,
        scale=score.scale,
        score_mod=score.score_mod is not None,
        bias=None if bias is None else tuple(bias.shape),
        sinks=sinks is not None,
        dropout=(score.dropout_p, score.dropout_seed),
        backward=backward,
        lse=lse,
    )


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"


def _check_options(plan: AttentionPlan, q: Tensor, sinks: Tensor | None, score: Score) -> None:
    B, H = q.shape[:2]
    whole, bias = (B, H, plan.seq_len, plan.kv_len), score.bias
    keys = "seq_len" if plan.kv_layout is None else "kv_len"
    if bias is not None:
        shape = (1,) * (4 - bias.ndim) + tuple(bias.shape)
        if len(shape) != 4 or any(n not in (1, size) for n, size in zip(shape, whole, strict=True)):
            raise LongmeshError(
                f"bias {tuple(bias.shape)} does not broadcast to {whole} (batch, heads, seq_len, {keys}); "
                "it covers the whole sequence, not this rank's tokens"
            )
    if sinks is not None and tuple(sinks.shape) != (H,):
        raise LongmeshError(f"sinks {tuple(sinks.shape)}: give one logit for each of the {H} query heads")
    if not 0.0 <= score.dropout_p < 1.0:
        raise LongmeshError(f"dropout_p={score.dropout_p}: give a probability from 0 to below 1")
    if score.dropout_p and score.dropout_seed is None:
        raise LongmeshError(
            f"dropout_p={score.dropout_p} needs dropout_seed=, the same on every rank and another each step"
        )
