"""Attention as one opaque op, for torch.compile: a full graph sees a call, not collectives and numpy.

    longmesh::attend(q, k, v, sinks?, name, scale?) -> [out, *what backward needs]

Only plain calls come here (no bias, score_mod or dropout); the others break the graph and run eagerly. The
op finds its plan by name in a registry of live `ContextParallel` objects. Its fake kernel computes shapes
from the plan alone, which is pure.

Pitfall: outputs of an op share no memory, with each other or with inputs, and have the strides that the
fake kernel says; so they are copied to contiguous ones where they would.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from longmesh.attention.execute.function import BoundCall, backward_rows, forward_rows, kept_of
from longmesh.attention.kernel.base import AttentionGradients, Score
from longmesh.attention.kernel.merge import accumulate_dtype
from longmesh.errors import LongmeshError

V = TypeVar("V", Tensor, Tensor | None)


class Caller(Protocol):
    """What the op needs of a `ContextParallel`."""

    def enter(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, score: Score) -> BoundCall: ...

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, score: Score) -> BoundCall: ...


class _Callers:
    """Live callers by name; a name is never used twice in a process."""

    def __init__(self) -> None:
        self._callers: weakref.WeakValueDictionary[str, Caller] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()

    def add(self, caller: Caller) -> str:
        name = f"context_parallel_{next(self._numbers)}"
        self._callers[name] = caller
        return name

    def get(self, name: str) -> Caller:
        return self._callers[name]


_registry = _Callers()


def register_caller(caller: Caller) -> str:
    """The name by which the op finds the caller, for as long as it lives."""
    return _registry.add(caller)


def cast_for_autocast(q: Tensor, k: Tensor, v: V) -> tuple[Tensor, Tensor, V]:
    """q, k and v in the dtype that autocast asks for, if it is on for their device."""
    if not all(isinstance(t, Tensor) for t in (q, k, v)) or not torch.is_autocast_enabled(q.device.type):
        return q, k, v  # what is not a tensor is told of where the call is checked
    dtype = torch.get_autocast_dtype(q.device.type)
    return q.to(dtype), k.to(dtype), v if v is None else v.to(dtype)


@torch.library.custom_op("longmesh::attend", mutates_args=())
def attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, name: str, scale: float | None
) -> list[Tensor]:
    """The output, then for each batch row and group of heads of the plan what backward needs. Collective over
    the mesh."""
    call = _registry.get(name).enter(q, k, v, sinks, Score(scale))
    out, saved = forward_rows(call, q, k, v, sinks)
    split = call.tasks[0].inner is not None
    groups = [each if split else (each.out, each.lse, each.remote_q) for each in kept_of(saved)]
    kept = [t for group in groups for t in group if t is not None]
    return [out.contiguous(), *(t.clone(memory_format=torch.contiguous_format) for t in kept)]


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, name: str, scale: float | None) -> list[Tensor]:
    (B, H, _, D), E, wide = q.shape, v.shape[3], accumulate_dtype(q.dtype)
    found = [q.new_empty((B, H, q.shape[2], E))]
    try:
        call = _registry.get(name).prepare(q, k, v, Score(scale))
    except LongmeshError:  # the op itself will raise it, on every rank; here it would on this one alone
        return found
    for task in [part for whole in call.tasks for part in whole.by_heads()]:
        route, group = task.route, task.heads
        b, S, K = B // len(call.tasks), route.tokens_in_group, route.keys_in_group
        h = H if group is None else group.q_stop - group.q_start
        g = k.shape[1] if group is None else group.kv_stop - group.kv_start
        if task.inner is not None:
            found += [q.new_empty((b, *shape)) for shape in ((h, S, D), (g, K, D), (g, K, E))]
        found += [q.new_empty((b, h, S, E), dtype=wide), q.new_empty((b, h, S), dtype=wide)]
        if route.has_remote_queries:
            found.append(q.new_empty((route.queries.num_received, b * h * D)))
    return found


@torch.library.custom_op("longmesh::attend_backward", mutates_args=())
def attend_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, kept: Sequence[Tensor], name: str,
    scale: float | None,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v and, if given, sinks. Collective over the mesh."""
    call = _registry.get(name).prepare(q, k, v, Score(scale))
    rest, saved = list(kept), []
    for task, b in [(part, b) for whole, b in call.batches() for part in whole.by_heads()]:
        own = [rest.pop(0) for _ in range(3)] if task.inner is not None else [q[b], k[b], v[b]]
        state = [rest.pop(0), rest.pop(0)]
        saved += [*own, *state, rest.pop(0) if task.route.has_remote_queries else None]
    dsinks = None if sinks is None else torch.zeros_like(sinks)
    totals = AttentionGradients(dout, dout, dout)
    dqkv = backward_rows(call, dout, saved, sinks, dsinks, totals, k.shape[1])
    copies = [t.to(q.dtype).clone(memory_format=torch.contiguous_format) for t in dqkv]
    return copies if dsinks is None else [*copies, dsinks]


@attend_backward.register_fake
def _(dout, q, k, v, sinks, kept, name, scale) -> list[Tensor]:
    like = [q, k, v] if sinks is None else [q, k, v, sinks]
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in like]


def _setup(ctx, inputs, output) -> None:
    q, k, v, sinks, ctx.name, ctx.scale = inputs
    ctx.has_sinks = sinks is not None
    ctx.save_for_backward(q, k, v, *([sinks] if ctx.has_sinks else []), *output[1:])


def _backward(ctx, grads):
    q, k, v, *kept = ctx.saved_tensors
    sinks = kept.pop(0) if ctx.has_sinks else None
    found = attend_backward(grads[0], q, k, v, sinks, kept, ctx.name, ctx.scale)
    return *found[:3], found[3] if ctx.has_sinks else None, None, None


attend.register_autograd(_backward, setup_context=_setup)
