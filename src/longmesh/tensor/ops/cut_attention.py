"""The steps of attention on DTensors whose tokens are sharded: the engine moves keys, and no rank holds them all.

Each rank attends with its own heads and batch rows, over the axes that shard tokens. CUDA's ops have further
outputs, of which only their own backwards make use. `attention.py` imports this file when the first such call is
planned: the engine is a third of what the package would import otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from longmesh._torch import OpOverload, aten
from longmesh.attention import masks, plan_attention
from longmesh.attention.execute.driver import Task
from longmesh.attention.execute.function import Call, backward_rows, forward_rows
from longmesh.attention.execute.route import Move, Route
from longmesh.attention.kernel.base import AttentionGradients, Score
from longmesh.attention.kernel.choose import choose, need_of
from longmesh.attention.kernel.merge import accumulate_dtype
from longmesh.attention.layout.base import collect
from longmesh.attention.layout.given import GivenLayout
from longmesh.comm.groups import AxisGroup
from longmesh.spec import Layout
from longmesh.tensor.ops.attention import TOKENS, gradient_of
from longmesh.tensor.planned import Planned
from longmesh.tensor.planner import Planner


def forward(p: Planner, func: OpOverload, given: dict[str, Any]) -> Any:
    query, key, value = (given[name] for name in ("query", "key", "value"))
    shape = (*query.shape[:3], value.shape[3])
    if not _group_has_tokens(query):
        out = p.local(torch.empty_like, query)
        lse = p.local(torch.Tensor.new_empty, query, query.local_shape[:3], dtype=torch.float32)
    else:
        route, group = _route_of(given)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Any, Any]:
            out, saved = forward_rows(_call(given, route, group, q, v), q, k, v, None)
            return out, saved[4]

        sent = _sent(route.keys, group) * _row(key, value) * key.dtype.itemsize
        out, lse = p.attend(2, attend, query, key, value, group=group, sent_bytes=sent)
    return (
        p.wrap(out, query, shape=shape),
        p.wrap(lse, query, shape=shape[:3], dtype=accumulate_dtype(query.dtype)),
        *_further_outputs(p, func, query),
    )


def _further_outputs(p: Planner, func: OpOverload, query: Planned) -> tuple[Any, ...]:
    """What a CUDA op returns beside output and log-sum-exp: lengths of packed sequences, which there are none of, the
    numbers of queries and keys, the state of a generator that was not used."""
    whole = Layout.replicated(query._layout.mesh)

    def unused(dtype: torch.dtype, *shape: int) -> Planned:
        local = p.local(torch.Tensor.new_zeros, query, shape, dtype=dtype)
        return p.wrap(local, query, layout=whole, shape=shape, dtype=dtype)

    tokens = query.shape[TOKENS]
    if func is aten._scaled_dot_product_flash_attention.default:
        state, seed = unused(torch.uint64, 2), unused(torch.uint64)
        return None, None, tokens, tokens, state, seed, unused(query.dtype, 0)
    if func is aten._scaled_dot_product_efficient_attention.default:
        return unused(torch.int64), unused(torch.int64)
    if func is aten._scaled_dot_product_cudnn_attention.default:
        return None, None, tokens, tokens, unused(torch.int64), unused(torch.int64), None
    return ()


def backward(p: Planner, func: OpOverload, given: dict[str, Any]) -> Any:
    query, key, value = inputs = [given[name] for name in ("query", "key", "value")]
    dout = p.redistribute(gradient_of(given), query._layout)
    if not _group_has_tokens(query):
        grads = tuple(p.local(torch.zeros_like, t) for t in inputs)
    else:
        route, group = _route_of(given)

        def differentiate(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any) -> list[torch.Tensor]:
            saved = [q, k, v, out.to(lse.dtype), lse, None]
            call, totals = _call(given, route, group, q, v), AttentionGradients(dout, dout, dout)
            found = backward_rows(call, dout, saved, None, None, totals, k.shape[1])
            return [g.to(t.dtype) for g, t in zip(found, (q, k, v), strict=True)]

        row = _row(key, value)
        sent = _sent(route.keys, group) * row * key.dtype.itemsize
        sent += _sent(route.home, group) * row * accumulate_dtype(key.dtype).itemsize
        operands = (dout, *inputs, given["out"], given["logsumexp"])
        grads = p.attend(3, differentiate, *operands, group=group, sent_bytes=sent)
    found = tuple(p.wrap(g, t) for g, t in zip(grads, inputs, strict=True))
    is_of_bias = func is aten._scaled_dot_product_efficient_attention_backward.default
    return (*found, None) if is_of_bias else found


def _sent(moves: Sequence[Move | None], group: AxisGroup) -> int:
    """The rows that this rank sends."""
    return sum(sum(m.send_counts) - m.send_counts[group.rank] for m in moves if m is not None)


def _row(key: Planned, value: Planned) -> int:
    """The elements of a row that travels: a token's key and value, of all batch rows and heads that are here."""
    batch, heads, _, head_dim = key.local_shape
    return batch * heads * (head_dim + value.local_shape[3])


def _group_has_tokens(query: Planned) -> bool:
    """Whether the ranks that share this rank's heads and batch rows have anything to attend with."""
    batch, heads, _, head_dim = query.local_shape
    return batch > 0 and heads > 0 and head_dim > 0 and query.shape[TOKENS] > 0


def _route_of(given: dict[str, Any]) -> tuple[Route, AxisGroup]:
    query: Planned = given["query"]
    own, local = query._tensor_layout, query.local_shape
    group = own.comm.group(tuple(sorted(own.layout.shard_axes(TOKENS))))
    sizes = (local[1], local[3], query.dtype.itemsize)
    return _route(group, own.layout, int(query.shape[TOKENS]), bool(given["is_causal"]), sizes), group


def _call(given: dict[str, Any], route: Route, group: AxisGroup, q: torch.Tensor, v: torch.Tensor) -> Call:
    score = Score(given["scale"])
    kernel = choose(need_of(q, v, score, (), True), None).kernel
    return Call((Task(route, kernel, score, group, None),))


def _route(
    group: AxisGroup, layout: Layout, seq_len: int, is_causal: bool, sizes: tuple[int, int, int]
) -> Route:
    """This rank's part of the plan; its ranks are the members of the group, in the group's order."""
    owned: list[tuple[int, int, int]] = []
    for rank, member in enumerate(group.members):
        start, length = layout.interval(TOKENS, seq_len, member)
        owned.append((int(start), int(start) + int(length), rank))
    heads, head_dim, itemsize = sizes
    plan = plan_attention(
        seq_len=seq_len,
        ranks=group.size,
        mask=masks.causal() if is_causal else masks.full(),
        layout=GivenLayout(collect(seq_len, group.size, owned)),
        exchange="ring",
        num_heads=heads,
        head_dim=head_dim,
        dtype_bytes=itemsize,
    )
    return Route(plan.rows[0], group.rank, tuple(range(group.size)), (group.rank,))
