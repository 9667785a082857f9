"""Attention on DTensors: whether the engine runs a call, or the op's rule.

    q, k, v   (batch, heads, tokens, head dim), all sharded alike: tokens by some axes, batch or heads by others

What the engine's plan does not cover (a mask tensor, dropout, keys in another layout than queries) runs by the rule.
"""

from __future__ import annotations

from typing import Any

from longmesh._torch import OpOverload, aten
from longmesh.tensor.make_plan import Family
from longmesh.tensor.op_facts import bind
from longmesh.tensor.planned import Planned
from longmesh.tensor.planner import USUAL, Planner

TOKENS = 2


def attend(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = bind(func, args, kwargs)
    if p.is_traced or not _is_ours(given):
        return USUAL
    from longmesh.tensor.ops import cut_attention  # not before a call needs it: it imports the engine

    plan = cut_attention.backward if "out" in given else cut_attention.forward
    return plan(p, func, given)


def gradient_of(given: dict[str, Any]) -> Any:
    """The gradient of the output, under the name that the op has for it."""
    return given["grad_out_"] if "grad_out_" in given else given["grad_out"]


def _is_ours(given: dict[str, Any]) -> bool:
    """Whether all tensors are sharded alike, tokens among the dims; a gradient is redistributed to that. A function of
    what a plan depends on."""
    tensors = [given[name] for name in ("query", "key", "value", "out", "logsumexp") if name in given]
    mask = given["attn_mask"] if "attn_mask" in given else given.get("attn_bias")
    if mask is not None or given["dropout_p"] or not all(isinstance(t, Planned) for t in tensors):
        return False
    query = tensors[0]
    layout = query._layout
    if "out" in given and (
        not isinstance(gradient_of(given), Planned) or gradient_of(given)._mesh is not query._mesh
    ):
        return False
    return (
        bool(layout.shard_axes(TOKENS))
        and not layout.partial_axes
        and 3 not in layout.shard_dims
        and all(t._layout is layout and t._mesh is query._mesh for t in tensors)
        and all(t.shape[:3] == query.shape[:3] for t in tensors)
    )


FAMILIES: dict[OpOverload, Family] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: attend,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: attend,
    aten._scaled_dot_product_flash_attention.default: attend,
    aten._scaled_dot_product_flash_attention_backward.default: attend,
    aten._scaled_dot_product_efficient_attention.default: attend,
    aten._scaled_dot_product_efficient_attention_backward.default: attend,
    aten._scaled_dot_product_cudnn_attention.default: attend,
    aten._scaled_dot_product_cudnn_attention_backward.default: attend,
}
