"""What a call's tensors must be, checked before the first byte is sent.

The checks look at shapes and types, which a program that does the same on every rank has alike on every
rank; so all ranks raise, or none.
"""

from __future__ import annotations

from torch import Tensor

from longmesh.attention.kernel.base import Score
from longmesh.attention.plan.attention_plan import AttentionPlan
from longmesh.errors import LongmeshError


def check_tokens(what: str, tensor: Tensor, dim: int, tokens: int, num_cuts: int) -> int:
    """The dim counted from the front, if it has the tokens that the layout wants."""
    if not -tensor.ndim <= dim < tensor.ndim:
        raise LongmeshError(f"{what}(dim={dim}): the tensor {tuple(tensor.shape)} has {tensor.ndim} dims")
    dim %= tensor.ndim
    whose = "the sequence" if what == "shard" else "this rank's part"
    if tensor.shape[dim] != tokens:
        raise LongmeshError(
            f"{what}(dim={dim}): the tensor is {tuple(tensor.shape)}, but {whose} has {tokens} tokens; "
            "give the dim that holds the tokens"
        )
    if num_cuts > 1 and (dim == 0 or tensor.shape[0] != num_cuts):
        raise LongmeshError(
            f"{what}(dim={dim}): the layout cuts {num_cuts} batch rows differently, so dim 0 must be the batch "
            f"of {num_cuts}; the tensor is {tuple(tensor.shape)}"
        )
    return dim


def check_call(
    plan: AttentionPlan, tokens: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, score: Score
) -> None:
    """Raise unless q, k, v and the options are what the plan can take."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if any(t.ndim != 4 for t in (q, k, v)):
        raise LongmeshError(f"attention takes (batch, heads, tokens, head dim), given {shapes}")
    if len({t.dtype for t in (q, k, v)}) > 1 or len({t.device for t in (q, k, v)}) > 1:
        kinds = ", ".join(f"{name} {t.dtype} on {t.device}" for name, t in zip("qkv", (q, k, v), strict=True))
        raise LongmeshError(f"q, k and v must have one dtype and one device, given {kinds}; use .to(q)")
    if any(t.shape[2] != tokens for t in (q, k, v)):
        raise LongmeshError(
            f"this rank has {tokens} of the layout's {plan.seq_len} tokens, given {shapes}; "
            "cut the input with shard(x, dim), which gives each rank its tokens in the layout's order"
        )
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise LongmeshError(
            f"q and k must have one batch and head dim, k and v one batch and number of heads; given {shapes}"
        )
    if k.shape[1] < 1 or q.shape[1] % k.shape[1]:
        raise LongmeshError(
            f"{k.shape[1]} key heads do not divide {q.shape[1]} query heads ({shapes}); "
            "each key head serves the same number of query heads"
        )
    if len(plan.rows) > 1 and q.shape[0] != len(plan.rows):
        raise LongmeshError(
            f"the mask has {len(plan.rows)} batch rows, q has a batch of {q.shape[0]}; give one list of lengths "
            "for all rows, or one for each"
        )
    _check_options(plan, q, sinks, score)


def _check_options(plan: AttentionPlan, q: Tensor, sinks: Tensor | None, score: Score) -> None:
    bias = score.bias
    B, H = q.shape[:2]
    whole = (B, H, plan.seq_len, plan.seq_len)
    if bias is not None:
        shape = (1,) * (4 - bias.ndim) + tuple(bias.shape)
        if len(shape) != 4 or any(n not in (1, size) for n, size in zip(shape, whole, strict=True)):
            raise LongmeshError(
                f"bias {tuple(bias.shape)} does not broadcast to {whole} (batch, heads, seq_len, seq_len); "
                "it covers the whole sequence, not this rank's tokens"
            )
    if sinks is not None and tuple(sinks.shape) != (H,):
        raise LongmeshError(f"sinks {tuple(sinks.shape)}: give one logit for each of the {H} query heads")
    if not 0.0 <= score.dropout_p < 1.0:
        raise LongmeshError(f"dropout_p={score.dropout_p}: give a probability from 0 to below 1")
