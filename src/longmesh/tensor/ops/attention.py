"""Attention on DTensors whose tokens are cut: the engine moves keys, and no rank holds them all.

    q, k, v   (batch, heads, tokens, head dim), all cut alike: tokens by some axes, batch or heads by others

Each rank attends with its own heads and batch rows, over the axes that cut tokens. What the engine's plan does not
cover (a mask tensor, dropout, keys that lie otherwise than queries) runs by the op's rule. CUDA's ops have further
outputs, of which only their own backwards make use.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._ops import OpOverload

from longmesh.attention import masks, plan_attention
from longmesh.attention.execute.driver import Task
from longmesh.attention.execute.function import Call, backward_rows, forward_rows
from longmesh.attention.execute.route import Route
from longmesh.attention.kernel.base import Gradients, Score
from longmesh.attention.kernel.choose import choose, need_of
from longmesh.attention.layout.base import collect
from longmesh.attention.layout.given import Given
from longmesh.comm import MeshComm
from longmesh.rules.lookup import can_read
from longmesh.spec import Layout
from longmesh.tensor.autograd import move
from longmesh.tensor.dispatch import USUAL, Handler
from longmesh.tensor.dtensor import DTensor
from longmesh.tensor.meta import contiguous_stride, global_stride
from longmesh.tensor.ops.pieces import bind

aten = torch.ops.aten

_TOKENS = 2


def forward(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = bind(func, args, kwargs)
    if not _is_ours(given):
        return USUAL
    query: DTensor = given["query"]
    q, k, v = (given[name]._local_tensor for name in ("query", "key", "value"))
    if q.numel() == 0 and not _group_has_tokens(q):
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    else:
        out, saved = forward_rows(_call(given), q, k, v, None)
        assert saved[4] is not None
        lse = saved[4]
    shape = (*query.shape[:3], given["value"].shape[3])
    return (
        DTensor(out, query._mesh, query._layout, shape, global_stride(shape, out)),
        DTensor(lse, query._mesh, query._layout, shape[:3], contiguous_stride(shape[:3])),
        *_further_outputs(func, query),
    )


def _further_outputs(func: OpOverload, query: DTensor) -> tuple[Any, ...]:
    """What a CUDA op returns beside output and log-sum-exp: lengths of packed sequences, which there are none of, the
    numbers of queries and keys, the state of a generator that was not used."""
    whole = Layout.replicated(query._layout.mesh)

    def unused(dtype: torch.dtype, *shape: int) -> DTensor:
        local = query._local_tensor.new_zeros(shape, dtype=dtype)
        return DTensor(local, query._mesh, whole, shape, local.stride())

    tokens = query.shape[_TOKENS]
    if func is aten._scaled_dot_product_flash_attention.default:
        state, seed = unused(torch.uint64, 2), unused(torch.uint64)
        return None, None, tokens, tokens, state, seed, unused(query.dtype, 0)
    if func is aten._scaled_dot_product_efficient_attention.default:
        return unused(torch.int64), unused(torch.int64)
    if func is aten._scaled_dot_product_cudnn_attention.default:
        return None, None, tokens, tokens, unused(torch.int64), unused(torch.int64), None
    return ()


def backward(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = bind(func, args, kwargs)
    if not _is_ours(given):
        return USUAL
    inputs = [given[name] for name in ("query", "key", "value")]
    q, k, v, out, lse = (given[name]._local_tensor for name in ("query", "key", "value", "out", "logsumexp"))
    dout = move(_gradient(given), given["query"]._layout)._local_tensor
    if q.numel() == 0 and not _group_has_tokens(q):
        grads = [torch.zeros_like(t) for t in (q, k, v)]
    else:
        saved = [q, k, v, out.to(lse.dtype), lse, None]
        grads = backward_rows(_call(given), dout, saved, None, None, Gradients(dout, dout, dout), k.shape[1])
    found = tuple(
        DTensor(g.to(t.dtype), t._mesh, t._layout, t.shape, global_stride(t.shape, g))
        for g, t in zip(grads, inputs, strict=True)
    )
    is_of_bias = func is aten._scaled_dot_product_efficient_attention_backward.default
    return (*found, None) if is_of_bias else found


def _gradient(given: dict[str, Any]) -> Any:
    return given["grad_out_"] if "grad_out_" in given else given["grad_out"]


def _group_has_tokens(local: torch.Tensor) -> bool:
    """Whether the ranks that share this rank's heads and batch rows have anything to attend with."""
    return local.shape[0] > 0 and local.shape[1] > 0 and local.shape[3] > 0


def _is_ours(given: dict[str, Any]) -> bool:
    """Whether all tensors are cut alike, tokens among the dims; a gradient is brought there. A function of what a plan
    depends on."""
    tensors = [given[name] for name in ("query", "key", "value", "out", "logsumexp") if name in given]
    mask = given["attn_mask"] if "attn_mask" in given else given.get("attn_bias")
    if mask is not None or given["dropout_p"] or not all(isinstance(t, DTensor) for t in tensors):
        return False
    query = tensors[0]
    layout = query._layout
    if "out" in given and (
        not isinstance(_gradient(given), DTensor) or _gradient(given)._mesh is not query._mesh
    ):
        return False
    return (
        can_read(query._local_tensor)  # not under a compiler, which can't see into the engine
        and bool(layout.cuts(_TOKENS))
        and not layout.partial_axes
        and 3 not in layout.shard_dims
        and all(t._layout is layout and t._mesh is query._mesh for t in tensors)
        and all(t.shape[:3] == query.shape[:3] for t in tensors)
    )


def _call(given: dict[str, Any]) -> Call:
    query: DTensor = given["query"]
    q, v = query._local_tensor, given["value"]._local_tensor
    held = query._tensor_layout
    route = _route(
        held.comm,
        held.layout,
        int(query.shape[_TOKENS]),
        bool(given["is_causal"]),
        (q.shape[1], q.shape[3], q.element_size()),
    )
    score = Score(given["scale"])
    kernel = choose(need_of(q, v, score, (), True), None).kernel
    group = held.comm.group(tuple(sorted(held.layout.cuts(_TOKENS))))
    return Call((Task(route, kernel, score, group, None),))


@functools.lru_cache(maxsize=1024)
def _route(
    comm: MeshComm, layout: Layout, seq_len: int, is_causal: bool, sizes: tuple[int, int, int]
) -> Route:
    """This rank's part of the plan; its ranks are the members of the group, in the group's order."""
    group = comm.group(tuple(sorted(layout.cuts(_TOKENS))))
    owned: list[tuple[int, int, int]] = []
    for rank, member in enumerate(group.members):
        start, length = layout.interval(_TOKENS, seq_len, member)
        owned.append((int(start), int(start) + int(length), rank))
    heads, head_dim, itemsize = sizes
    plan = plan_attention(
        seq_len=seq_len,
        ranks=group.size,
        mask=masks.causal() if is_causal else masks.full(),
        layout=Given(collect(seq_len, group.size, owned)),
        exchange="ring",
        num_heads=heads,
        head_dim=head_dim,
        dtype_bytes=itemsize,
    )
    return Route(plan.rows[0], group.rank, tuple(range(group.size)), (group.rank,))


HANDLERS: dict[OpOverload, Handler] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: forward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: backward,
    aten._scaled_dot_product_flash_attention.default: forward,
    aten._scaled_dot_product_flash_attention_backward.default: backward,
    aten._scaled_dot_product_efficient_attention.default: forward,
    aten._scaled_dot_product_efficient_attention_backward.default: backward,
    aten._scaled_dot_product_cudnn_attention.default: forward,
    aten._scaled_dot_product_cudnn_attention_backward.default: backward,
}
