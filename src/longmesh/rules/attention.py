"""Scaled dot product attention, torch's fused CPU op and its backward: by batch row, by head, by query row.

    query (B, H, L, E), key and value (B, K, S, E), mask to (B, H, L, S)  ->  output (B, H, L, E), lse (B, H, L)

Query rows may be sharded where keys and values are whole; their gradients are then pending sums. A causal mask counts
rows and keys from 0, so a rank whose rows start elsewhere is given its own mask, and only the keys that its
rows can see. Pitfall: the kernel ends the process on tensors without elements; a rank that has none does not call it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from longmesh.rules.pointwise import elementwise_meta, shard_of
from longmesh.rules.rule import (
    AVG,
    AxisRule,
    LocalView,
    Meta,
    OpCall,
    OutMeta,
    P,
    R,
    Rule,
    S,
    contiguous,
    line,
)
from longmesh.spec import Placement

_BATCH, _HEAD, _ROW = 0, 1, 2


def _lines(call: OpCall, outputs: Callable[[int], list[Placement]]) -> list[AxisRule]:
    """One line per dim that may be sharded; `outputs` of that dim."""
    query, key, value, mask = (call[name] for name in ("query", "key", "value", "attn_mask"))
    shared = query.shape[_HEAD] == key.shape[_HEAD]
    lines: list[AxisRule] = []
    for dim in (_BATCH, _HEAD, _ROW):
        inputs: list[Placement] = []
        for meta in call.tensors:
            if mask is not None and meta.index == mask.index:
                inputs.append(shard_of(meta, dim, 4))
            else:
                inputs.append(R if dim == _ROW and meta.index in (key.index, value.index) else S(dim))
        even = ((query.index, _HEAD), (key.index, _HEAD)) if dim == _HEAD and not shared else ()
        lines.append(line(inputs, outputs(dim), even=even))
    return lines


def forward_lines(call: OpCall) -> list[AxisRule]:
    """Also linear in the values."""
    value: Meta = call["value"]
    pending = [line([p if m.index == value.index else R for m in call.tensors], [p, R]) for p in (P, AVG)]
    return [*_lines(call, lambda dim: [S(dim), S(dim)]), *pending]


def backward_lines(call: OpCall) -> list[AxisRule]:
    """Gradients of query, key and value; linear in that of the output."""

    def outputs(dim: int) -> list[Placement]:
        return [S(dim), P, P] if dim == _ROW else [S(dim)] * 3

    others = [R] * (len(call.tensors) - 1)
    return [*_lines(call, outputs), *(line([p, *others], [p] * 3) for p in (P, AVG))]


def forward_meta(call: OpCall) -> tuple[OutMeta, ...]:
    """The result is in memory as the query is; the rest, and gradients, rows before heads."""
    query: Meta = call["query"]
    return elementwise_meta(query.shape, (query,)), _rows_first(*query.shape[:3])


def _rows_first(batch: int, heads: int, rows: int, *last: int) -> OutMeta:
    stride = contiguous((batch, rows, heads, *last)).stride
    return OutMeta((batch, heads, rows, *last), (stride[0], stride[2], stride[1], *stride[3:]))


def backward_meta(call: OpCall) -> tuple[OutMeta, ...]:
    metas = (call[name].shape for name in ("query", "key", "value"))
    return tuple(_rows_first(*shape) for shape in metas)


def local_op(call: OpCall, view: LocalView) -> Callable[..., Any] | None:
    """Zeros where there is nothing, and the rank's own causal mask where its rows are not the first."""
    query: Meta = call["query"]
    if any(0 in shape for shape in view.input_shapes):
        return _zeros(call, view)
    start, rows = view.input_offsets[query.index][_ROW], view.input_shapes[query.index][_ROW]
    if not call["is_causal"] or rows == query.shape[_ROW]:
        return None
    keys = min(start + rows, call["key"].shape[_ROW])
    return (
        _causal_forward(call, start, keys) if len(call.outputs) == 2 else _causal_backward(call, start, keys)
    )


def _zeros(call: OpCall, view: LocalView) -> Callable[..., Any]:
    is_forward = len(call.outputs) == 2
    wide = torch.float64 if call.tensors[0].dtype is torch.float64 else torch.float32

    def zeros(first: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        found = [first.new_zeros(shape) for shape in view.output_shapes]
        return (found[0], found[1].to(wide)) if is_forward else tuple(found)

    return zeros


def _seen(query: torch.Tensor, start: int, keys: int) -> torch.Tensor:
    """What the rows from `start` on may see of the first `keys` keys: 0, or -inf."""
    rows = query.shape[_ROW]
    hidden = torch.full((rows, keys), -math.inf, dtype=query.dtype, device=query.device)
    return hidden.triu(start + 1)


def _causal_forward(call: OpCall, start: int, keys: int) -> Callable[..., Any]:
    func, scale = call.func, call["scale"]

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, ...]:
        key, value = key.narrow(_ROW, 0, keys), value.narrow(_ROW, 0, keys)
        return func(query, key, value, 0.0, False, attn_mask=_seen(query, start, keys), scale=scale)

    return attend


def _causal_backward(call: OpCall, start: int, keys: int) -> Callable[..., Any]:
    func, scale = call.func, call["scale"]
    whole = call["key"].shape[_ROW]

    def differentiate(
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, ...]:
        out, lse = args[:2]
        key, value = key.narrow(_ROW, 0, keys), value.narrow(_ROW, 0, keys)
        mask = _seen(query, start, keys)
        found = func(grad, query, key, value, out, lse, 0.0, False, attn_mask=mask, scale=scale)
        unseen = (0, 0, 0, whole - keys)
        return found[0], *(torch.nn.functional.pad(g, unseen) for g in found[1:])

    return differentiate


RULES: dict[str, Rule] = {
    "_scaled_dot_product_flash_attention_for_cpu.default": Rule(
        forward_lines, forward_meta, local_op=local_op
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward.default": Rule(
        backward_lines, backward_meta, local_op=local_op
    ),
}
