"""nn.MultiheadAttention over a cut sequence: its function, with attention over all ranks in the middle.

Shapes: L this rank's queries, S its keys, B batch, E features, H heads, D = E / H.

Projections work token by token, so each rank does those of its own. Masks cover the whole sequence, as elsewhere in
a scope: `attn_mask` (all queries, all keys), `key_padding_mask` (batch, all keys).
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longmesh.errors import LongmeshError

if TYPE_CHECKING:
    from longmesh.attention.scope.cut_sequence import CutSequence

_SIGNATURE = inspect.signature(F.multi_head_attention_forward)
# What makes keys of its own, which belong to no token.
_REFUSED = ("bias_k", "bias_v", "add_zero_attn", "static_k", "static_v")


def attend_as_module(cut: CutSequence, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """F.multi_head_attention_forward of this rank's tokens: (L, B, E) or (L, E). Collective: every rank."""
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    _refuse(given)
    query, heads = given["query"], given["num_heads"]
    q, k, v = (_split(t, heads) for t in _project(given))
    mask, is_causal = _mask(given, q.shape[0], heads), given["is_causal"]
    if is_causal and given["key_padding_mask"] is None:
        mask = None  # torch, too, takes the hint in place of the mask
    dropout = given["dropout_p"] if given["training"] else 0.0
    out = cut.attend(q, k, v, mask, dropout, is_causal and mask is None)
    out = out.permute(2, 0, 1, 3).flatten(2)  # (L, B, E)
    out = F.linear(out, given["out_proj_weight"], given["out_proj_bias"])
    return (out if query.ndim == 3 else out[:, 0]), None


def _refuse(given: dict[str, Any]) -> None:
    name = next((name for name in _REFUSED if given[name] is not None and given[name] is not False), None)
    if name is not None:
        raise LongmeshError(
            f"nn.MultiheadAttention with {name} inside a scope of context parallelism: its key belongs to no token of "
            "the sequence; make the module without it"
        )
    if given["need_weights"]:
        raise LongmeshError(
            "nn.MultiheadAttention with need_weights=True inside a scope of context parallelism: no rank has all "
            "weights of a query; call it with need_weights=False"
        )


def _project(given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    weights = [given[f"{name}_proj_weight"] for name in "qkv"]
    if not given["use_separate_proj_weight"]:
        weights = given["in_proj_weight"].chunk(3)
    bias = given["in_proj_bias"]
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    tensors = (given["query"], given["key"], given["value"])
    q, k, v = (F.linear(t, w, b) for t, w, b in zip(tensors, weights, biases, strict=True))
    return q, k, v


def _split(tensor: Tensor, heads: int) -> Tensor:
    """(B, H, L, D) of (L, B, E) or (L, E)."""
    tensor = tensor if tensor.ndim == 3 else tensor[:, None]
    return tensor.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)


def _mask(given: dict[str, Any], batch: int, heads: int) -> Tensor | None:
    """Both masks as what is added to scores; None if there are none."""
    mask, padding, like = given["attn_mask"], given["key_padding_mask"], given["query"]
    if mask is not None:
        mask = _added(mask, like)
        mask = mask.unflatten(0, (batch, heads)) if mask.ndim == 3 else mask
    if padding is None:
        return mask
    padding = _added(padding, like).reshape(-1, 1, 1, padding.shape[-1])
    return padding if mask is None else mask + padding


def _added(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype is not torch.bool:
        return mask
    zeros = torch.zeros(mask.shape, dtype=like.dtype, device=mask.device)
    return zeros.masked_fill(mask, float("-inf"))
