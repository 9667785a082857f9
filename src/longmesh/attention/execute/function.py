"""The autograd functions: attention over a plan, and the gathering of a cut tensor.

Shapes: B batch, H query heads, G key heads, T tokens of this rank, S of its group, D head dim, E value's.

What is saved for backward is what one rank holds anyway: queries, keys and values (head shards, where heads
are split), the result and its log-sum-exp. Keys of other ranks are fetched again.

The log-sum-exp of each query's scores may be asked for, too: d lse_i / d s_ij = p_ij, which is what the output's
gradient is where every value is 1 and the output counts as 0:

    ds = p * (dout @ v - sum(dout * out))        with  v = 1,  out = 0,  dout = dlse

So its gradient is a backward of its own over the same plan, with values of one feature; it runs only where something
depends on it.

Gradients of tensors that every rank holds whole (bias, sinks, what score_mod captured) are this rank's
share: their sum over the ranks is the gradient, as for the weights of the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longmesh._torch import no_torch_functions
from longmesh._torch.first_derivative import first_derivative_only
from longmesh.attention.exchange.ulysses import HeadGroup
from longmesh.attention.execute.driver import Task, run_backward, run_forward
from longmesh.attention.execute.heads import KV, Q, by_head_groups, to_tokens
from longmesh.attention.execute.watch import AttentionWatcher
from longmesh.attention.kernel.base import AttentionGradients, finish, zero_like
from longmesh.attention.kernel.merge import apply_sinks, sinks_gradient
from longmesh.attention.plan.attention_plan import AttentionPlan
from longmesh.comm import AxisGroup, collectives


@dataclass(frozen=True, eq=False)
class BoundCall:
    """One attention call: a task for the whole batch, or one for each batch row.

    `plan`: what the tasks were made from, for whoever watches.
    """

    tasks: tuple[Task, ...]
    plan: AttentionPlan | None = None
    watcher: AttentionWatcher | None = None

    def watched(self, direction: str) -> contextlib.AbstractContextManager[None]:
        """To be entered around the work of a pass."""
        if self.watcher is None or self.plan is None:
            return contextlib.nullcontext()
        return self.watcher(self.plan, direction)

    def batches(self) -> list[tuple[Task, slice]]:
        if len(self.tasks) == 1:
            return [(self.tasks[0], slice(None))]
        return [(replace(task, batch_start=b), slice(b, b + 1)) for b, task in enumerate(self.tasks)]


class Kept(NamedTuple):
    """What backward needs of one group of heads of a batch row: its inputs, the result and its log-sum-exp, and the
    queries of others that were computed here, as rows."""

    q: Tensor
    k: Tensor
    v: Tensor | None  # None: a part of the keys
    out: Tensor
    lse: Tensor
    remote_q: Tensor | None


def kept_of(saved: Sequence[Tensor | None]) -> list[Kept]:
    """The groups in a flat list of saved tensors, as autograd keeps them."""
    size = len(Kept._fields)
    return [Kept(*saved[i : i + size]) for i in range(0, len(saved), size)]  # type: ignore[arg-type]


def mark(call: BoundCall, like: Tensor) -> Tensor:
    """Nothing, shaped as the cut is: a checkpoint compares what its recomputation saves, and must not take attention
    over this rank's tokens alone, after a scope, for that over the whole sequence."""
    owned = call.tasks[0].route.row.ownership
    return like.new_empty((0, owned.seq_len, owned.num_ranks))


NO_SECOND = (
    "attention over a cut sequence has no second derivative: its gradient is computed block by block, without a graph; "
    "compute attention from matrix products and softmax, on the whole sequence, where you need one"
)


class AttentionFunction(torch.autograd.Function):
    """`AttentionFunction.apply(call, q, k, v, bias, sinks, *captured)`. Collective over the mesh, both ways."""

    @staticmethod
    def forward(ctx, call: BoundCall, q, k, v, bias, sinks, *captured):
        ctx.call, ctx.num_captured, ctx.kv_heads = call, len(captured), k.shape[1]
        out, saved = forward_rows(call, q, k, v, sinks)
        ctx.save_for_backward(mark(call, q), bias, sinks, *captured, *saved)
        return out

    @staticmethod
    @first_derivative_only(NO_SECOND)
    def backward(ctx, dout):  # type: ignore[override]
        _, bias, sinks, *rest = ctx.saved_tensors
        captured, saved = rest[: ctx.num_captured], rest[ctx.num_captured :]
        dbias = zero_like(bias) if ctx.needs_input_grad[4] else None
        dsinks = torch.zeros_like(sinks) if sinks is not None else None
        totals = AttentionGradients(dout, dout, dout, dbias, [zero_like(t) for t in captured])
        dqkv = backward_rows(ctx.call, dout, saved, sinks, dsinks, totals, ctx.kv_heads)
        dqkv = [grad.to(saved[0].dtype) for grad in dqkv] + [None] * (3 - len(dqkv))
        dbias = None if dbias is None else dbias.to(bias.dtype)
        dcaptured = [grad.to(t.dtype) for grad, t in zip(totals.dcaptured, captured, strict=True)]
        return None, *dqkv, dbias, dsinks, *dcaptured


@contextlib.contextmanager
def _as_written(tensor: Tensor) -> Iterator[None]:
    """Ops run as they are written here, whatever autocast and function modes are on outside."""
    device = tensor.device.type
    cast = torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else None
    with cast or contextlib.nullcontext(), no_torch_functions():
        yield


def forward_rows(
    call: BoundCall, q: Tensor, k: Tensor, v: Tensor | None, sinks: Tensor | None
) -> tuple[Tensor, list[Tensor | None]]:
    """The output of this rank's tokens, and what is `Kept` of each batch row and group of heads."""
    outs, saved = [], []
    with _as_written(q), call.watched("forward"):
        for task, b in call.batches():
            out, kept = _forward_row(task, q[b], k[b], None if v is None else v[b], sinks)
            outs.append(out)
            saved += kept
    return outs[0] if len(outs) == 1 else torch.cat(outs), saved


def backward_rows(
    call: BoundCall, dout: Tensor, saved: Sequence[Tensor | None], sinks: Tensor | None, dsinks: Tensor | None,
    totals: AttentionGradients, kv_heads: int,
) -> Sequence[Tensor]:  # fmt: skip
    """dq, dk and dv (unless it is in dk) in the accumulating dtype; `dsinks` and what is in `totals` grow."""
    rows = []
    with _as_written(dout), call.watched("backward"):
        batches = call.batches()
        each = len(saved) // len(batches)
        for i, (task, b) in enumerate(batches):
            kept = saved[each * i : each * (i + 1)]
            rows.append(_backward_row(task, dout[b], kept, sinks, dsinks, totals, kv_heads))
    return rows[0] if len(rows) == 1 else [torch.cat(parts) for parts in zip(*rows, strict=True)]


def _values(task: Task, k: Tensor, v: Tensor | None) -> Tensor:
    return k[..., : task.value_dim] if v is None else v


def _forward_row(task: Task, q: Tensor, k: Tensor, v: Tensor | None, sinks: Tensor | None):
    """The output of this rank's tokens, and what is `Kept` of each group of heads."""
    kept: list[Tensor | None] = []

    def compute(_number: int, task: Task, qkv: Sequence[Tensor]) -> list[Tensor]:
        q_BHSD, k_BGSD, *values = qkv
        v_BGSE = values[0] if values else None
        state, remote_q = run_forward(task, q_BHSD, k_BGSD, _values(task, k_BGSD, v_BGSE))
        if sinks is not None:
            state = apply_sinks(state, sinks[_heads_of(task)])
        kept.extend(Kept(q_BHSD, k_BGSD, v_BGSE, state.out_BHSD, state.lse_BHS, remote_q))
        return [state.out_BHSD.to(q.dtype)]

    given = (q, k) if v is None else (q, k, v)
    if task.inner is None:
        (out,) = compute(0, task, given)
    else:
        (out,) = by_head_groups(task, given, (Q, KV, KV)[: len(given)], compute, [Q], [q.shape[1]])
    return out, kept


def _backward_row(task: Task, dout, kept, sinks, dsinks, totals: AttentionGradients, kv_heads: int):
    rest, groups = SharedKeyHead(), kept_of(kept)

    def compute(number: int, task: Task, douts: Sequence[Tensor]) -> Sequence[Tensor]:
        q, k, v, out, lse, remote_q = groups[number]
        final = finish(out, lse, douts[0])
        if dsinks is not None:
            heads = _heads_of(task)
            dsinks[heads] += sinks_gradient(sinks[heads], final.lse_BHS, final.delta_BHS)
        grads = run_backward(task, q, k, _values(task, k, v), remote_q, final, totals)
        return grads if task.heads is None else rest.settle(task.heads, *grads)

    if task.inner is None:
        return compute(0, task, [dout])
    kinds = (Q, KV, KV) if task.value_dim is None else (Q, KV)
    num_heads = [dout.shape[1] if kind == Q else kv_heads for kind in kinds]
    return by_head_groups(task, [dout], [Q], compute, kinds, num_heads)


class SharedKeyHead:
    """The gradient of a key head that more than one group of heads reads: it grows until the last one."""

    def __init__(self) -> None:
        self._so_far: list[Tensor] | None = None

    def settle(self, group: HeadGroup, dq: Tensor, *dkv: Tensor) -> list[Tensor]:
        """The gradients that are complete with this group; what is not is kept for the next."""
        if self._so_far is not None:
            for grad, before in zip(dkv, self._so_far, strict=True):
                grad[:, :1] += before
        done = group.kv_done - group.kv_start
        self._so_far = None if group.kv_done == group.kv_stop else [grad[:, done:] for grad in dkv]
        return [dq, *(grad[:, :done] for grad in dkv)]


def _heads_of(task: Task) -> slice:
    return slice(None) if task.heads is None else slice(task.heads.q_start, task.heads.q_stop)


class GatherTokens(torch.autograd.Function):
    """`GatherTokens.apply(rows, counts, order, mine, group)`: every rank's rows, in the order that `order` says.

    Collective forward; backward sends nothing: the gradient of a rank's rows is its part.
    """

    @staticmethod
    def forward(ctx, rows, counts: tuple[int, ...], order: Tensor, mine: Tensor, group: AxisGroup):
        ctx.save_for_backward(mine)
        most = max(counts)
        padded = rows.new_zeros((most, *rows.shape[1:]))
        padded[: rows.shape[0]] = rows
        whole = collectives.all_gather(padded.view(-1), group=group).view(len(counts) * most, *rows.shape[1:])
        return whole.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[override]
        (mine,) = ctx.saved_tensors
        return grad.index_select(0, mine), None, None, None, None


class AttendWithLse(torch.autograd.Function):
    """`AttendWithLse.apply(call, q, k, v, *captured)`: output and log-sum-exp. Collective over the mesh, both ways."""

    @staticmethod
    def forward(ctx, call: BoundCall, q, k, v, *captured):
        ctx.set_materialize_grads(False)
        ctx.call, ctx.num_captured = call, len(captured)
        out, saved = forward_rows(call, q, k, v, None)
        ctx.save_for_backward(mark(call, q), *captured, q, k, v, *saved)
        return out, _own_lse(call, saved, q.shape[1])

    @staticmethod
    @first_derivative_only(NO_SECOND)
    def backward(ctx, dout, dlse):  # type: ignore[override]
        _, *rest = ctx.saved_tensors
        captured, rest = rest[: ctx.num_captured], rest[ctx.num_captured :]
        (q, k, v), saved = rest[:3], rest[3:]
        given = (q, k) if v is None else (q, k, v)
        dqkv, dcaptured = [zero_like(t) for t in given], [zero_like(t) for t in captured]

        def add_up(call: BoundCall, grad: Tensor, kept: Sequence[Tensor | None]) -> None:
            into = AttentionGradients(grad, grad, grad, None, dcaptured)
            found = backward_rows(call, grad, kept, None, None, into, k.shape[1])
            totals = dqkv if grad is dout else dqkv[:2]
            for total, part in zip(totals, found, strict=False):
                total += part

        if dout is not None:
            add_up(ctx.call, dout, saved)
        if dlse is not None:
            tasks = tuple(replace(task, value_dim=None) for task in ctx.call.tasks)
            add_up(BoundCall(tasks), dlse.unsqueeze(-1), _ones_for_values(saved))
        found = [grad.to(t.dtype) for grad, t in zip(dqkv, given, strict=True)] + [None] * (3 - len(given))
        return None, *found, *(grad.to(t.dtype) for grad, t in zip(dcaptured, captured, strict=True))


def _own_lse(call: BoundCall, saved: Sequence[Tensor | None], num_heads: int) -> Tensor:
    """(B, H, S) of this rank's tokens; collective where heads are split."""
    found, batches = [], call.batches()
    each = len(saved) // len(batches)
    for i, (task, _) in enumerate(batches):
        by_group = [kept.lse for kept in kept_of(saved[each * i : each * (i + 1)])]
        lse = by_group[0]
        if task.inner is not None:
            lse = to_tokens(task, [[t.unsqueeze(-1)] for t in by_group], [Q], [num_heads])[0].squeeze(-1)
        found.append(lse)
    return found[0].contiguous() if len(found) == 1 else torch.cat(found)


def _ones_for_values(saved: Sequence[Tensor | None]) -> list[Tensor | None]:
    """What was kept, with values of 1 and outputs of 0, of one feature each."""
    found: list[Tensor | None] = []
    for kept in kept_of(saved):
        ones, zeros = torch.ones_like(kept.k[..., :1]), torch.zeros_like(kept.out[..., :1])
        found += kept._replace(v=ones, out=zeros)
    return found
