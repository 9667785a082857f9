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

from longmesh._torch import OpOverload, aten
from longmesh.rules.planned import Planned
from longmesh.rules.pointwise import elementwise_meta, shard_of
from longmesh.rules.rule import (
    AVG,
    AxisRule,
    Fixed,
    LocalView,
    Meta,
    OpCall,
    OutMeta,
    P,
    R,
    Rule,
    S,
    arguments_of,
    contiguous,
    line,
)
from longmesh.rules.steps import AttendOptions
from longmesh.rules.writer import Writer
from longmesh.spec import Layout, Placement

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
    attend_rows = _causal_forward if len(call.outputs) == 2 else _causal_backward
    return Fixed(attend_rows, (call.func, call["scale"], start, keys))


def _zeros(call: OpCall, view: LocalView) -> Callable[..., Any]:
    wide = _wide(call.tensors[0].dtype) if len(call.outputs) == 2 else None
    return Fixed(_zeros_of, (view.output_shapes, wide))


def _zeros_of(
    shapes: tuple[tuple[int, ...], ...],
    wide: torch.dtype | None,
    first: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, ...]:
    found = [first.new_zeros(shape) for shape in shapes]
    return tuple(found) if wide is None else (found[0], found[1].to(wide))


def _seen(query: torch.Tensor, start: int, keys: int) -> torch.Tensor:
    """What the rows from `start` on may see of the first `keys` keys: 0, or -inf."""
    rows = query.shape[_ROW]
    hidden = torch.full((rows, keys), -math.inf, dtype=query.dtype, device=query.device)
    return hidden.triu(start + 1)


def _causal_forward(
    func: OpOverload,
    scale: float | None,
    start: int,
    keys: int,
    /,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, ...]:
    key, value = key.narrow(_ROW, 0, keys), value.narrow(_ROW, 0, keys)
    return func(query, key, value, 0.0, False, attn_mask=_seen(query, start, keys), scale=scale)


def _causal_backward(
    func: OpOverload,
    scale: float | None,
    start: int,
    keys: int,
    /,
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, ...]:
    out, lse = args[:2]
    unseen = (0, 0, 0, key.shape[_ROW] - keys)
    key, value = key.narrow(_ROW, 0, keys), value.narrow(_ROW, 0, keys)
    mask = _seen(query, start, keys)
    found = func(grad, query, key, value, out, lse, 0.0, False, attn_mask=mask, scale=scale)
    return found[0], *(torch.nn.functional.pad(g, unseen) for g in found[1:])


# -- tokens sharded: the engine moves keys, and no rank holds them all -----------------------------


def attend(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The forward of any fused op whose q, k, v are sharded alike: tokens by some axes, batch or heads by others. Each
    rank attends with its own heads and batch rows, over the axes that shard tokens. What the engine's plan does not
    cover (a mask tensor, dropout, keys in another layout than queries) runs by the op's lines."""
    given = arguments_of(func, args, kwargs)
    if p.is_traced or not _is_ours(given):
        return p.by_lines(func, args, kwargs)
    query, key, value = (given[name] for name in ("query", "key", "value"))
    shape = (*query.shape[:3], value.shape[3])
    if not _group_has_tokens(query):
        out = p.local(torch.empty_like, query)
        lse = p.local(torch.Tensor.new_empty, query, query.local_shape[:3], dtype=torch.float32)
    else:
        options, axes = _options(given)
        out, lse = p.execute(2, "attend", options, query, key, value, axes=axes)
    return (
        p.wrap(out, query, shape=shape),
        p.wrap(lse, query, shape=shape[:3], dtype=_wide(query.dtype)),
        *_further_outputs(p, func, query),
    )


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What log-sum-exps and partial results are kept in."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _further_outputs(p: Writer, func: OpOverload, query: Planned) -> tuple[Any, ...]:
    """What a CUDA op returns beside output and log-sum-exp: lengths of packed sequences, which there are none of, the
    numbers of queries and keys, the state of a generator that was not used."""
    whole = Layout.replicated(query.global_layout.mesh)

    def unused(dtype: torch.dtype, *shape: int) -> Planned:
        local = p.local(torch.Tensor.new_zeros, query, shape, dtype=dtype)
        return p.wrap(local, query, layout=whole, shape=shape, dtype=dtype)

    tokens = query.shape[_ROW]
    if func is aten._scaled_dot_product_flash_attention.default:
        state, seed = unused(torch.uint64, 2), unused(torch.uint64)
        return None, None, tokens, tokens, state, seed, unused(query.dtype, 0)
    if func is aten._scaled_dot_product_efficient_attention.default:
        return unused(torch.int64), unused(torch.int64)
    if func is aten._scaled_dot_product_cudnn_attention.default:
        return None, None, tokens, tokens, unused(torch.int64), unused(torch.int64), None
    return ()


def attend_backward(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gradients of query, key and value: keys pass again, and what is computed for others goes home."""
    given = arguments_of(func, args, kwargs)
    if p.is_traced or not _is_ours(given):
        return p.by_lines(func, args, kwargs)
    query, key, value = inputs = [given[name] for name in ("query", "key", "value")]
    dout = p.redistribute(_gradient(given), query.global_layout)
    if not _group_has_tokens(query):
        grads = tuple(p.local(torch.zeros_like, t) for t in inputs)
    else:
        options, axes = _options(given)
        operands = (dout, query, key, value, given["out"], given["logsumexp"])
        grads = p.execute(3, "attend_backward", options, *operands, axes=axes)
    found = tuple(p.wrap(g, t) for g, t in zip(grads, inputs, strict=True))
    is_of_bias = func is aten._scaled_dot_product_efficient_attention_backward.default
    return (*found, None) if is_of_bias else found


def _gradient(given: dict[str, Any]) -> Any:
    return given["grad_out_"] if "grad_out_" in given else given["grad_out"]


def _group_has_tokens(query: Planned) -> bool:
    """Whether the ranks that share this rank's heads and batch rows have anything to attend with."""
    batch, heads, _, head_dim = query.local_shape
    return batch > 0 and heads > 0 and head_dim > 0 and query.shape[_ROW] > 0


def _is_ours(given: dict[str, Any]) -> bool:
    """Whether all tensors are sharded alike, tokens among the dims; a gradient is redistributed to that. A function of
    what a plan depends on."""
    tensors = [given[name] for name in ("query", "key", "value", "out", "logsumexp") if name in given]
    mask = given["attn_mask"] if "attn_mask" in given else given.get("attn_bias")
    if mask is not None or given["dropout_p"] or not all(isinstance(t, Planned) for t in tensors):
        return False
    query = tensors[0]
    layout = query.global_layout
    if "out" in given and (
        not isinstance(_gradient(given), Planned) or _gradient(given).comm is not query.comm
    ):
        return False
    return (
        bool(layout.shard_axes(_ROW))
        and not layout.partial_axes
        and 3 not in layout.shard_dims
        and all(t.global_layout is layout and t.comm is query.comm for t in tensors)
        and all(t.shape[:3] == query.shape[:3] for t in tensors)
    )


def _options(given: dict[str, Any]) -> tuple[AttendOptions, tuple[int, ...]]:
    query, key, value = (given[name] for name in ("query", "key", "value"))
    batch, heads, _, head_dim = key.local_shape
    options = AttendOptions(
        layout=query.global_layout,
        dim=_ROW,
        seq_len=int(query.shape[_ROW]),
        is_causal=bool(given["is_causal"]),
        scale=given["scale"],
        heads=query.local_shape[_HEAD],
        head_dim=query.local_shape[3],
        row=batch * heads * (head_dim + value.local_shape[3]),
        dtype=key.dtype,
    )
    return options, tuple(sorted(query.global_layout.shard_axes(_ROW)))


RULES: dict[str, Rule] = {
    "_scaled_dot_product_flash_attention_for_cpu.default": Rule(
        forward_lines, forward_meta, local_op=local_op, program=attend
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward.default": Rule(
        backward_lines, backward_meta, local_op=local_op, program=attend_backward
    ),
}
