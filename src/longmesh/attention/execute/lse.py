"""Attention that also gives the log-sum-exp of each query's scores, and takes its gradient.

    d lse_i / d s_ij = p_ij, which is what the output's gradient is where every value is 1 and the output counts as 0:

    ds = p * (dout @ v - sum(dout * out))        with  v = 1,  out = 0,  dout = dlse

So the gradient of the log-sum-exp is a backward of its own over the same plan, with values of one feature; it runs only
where something depends on it. Shapes: B batch, H query heads, S tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from longmesh._torch.first_derivative import first_derivative_only
from longmesh.attention.execute.function import NO_SECOND, Call, backward_rows, forward_rows, kept_of, mark
from longmesh.attention.execute.heads import Q, to_tokens
from longmesh.attention.kernel.base import AttentionGradients, zero_like


class AttendWithLse(torch.autograd.Function):
    """`AttendWithLse.apply(call, q, k, v, *captured)`: output and log-sum-exp. Collective over the mesh, both ways."""

    @staticmethod
    def forward(ctx, call: Call, q, k, v, *captured):
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

        def add_up(call: Call, grad: Tensor, kept: Sequence[Tensor | None]) -> None:
            into = AttentionGradients(grad, grad, grad, None, dcaptured)
            found = backward_rows(call, grad, kept, None, None, into, k.shape[1])
            totals = dqkv if grad is dout else dqkv[:2]
            for total, part in zip(totals, found, strict=False):
                total += part

        if dout is not None:
            add_up(ctx.call, dout, saved)
        if dlse is not None:
            tasks = tuple(replace(task, value_dim=None) for task in ctx.call.tasks)
            add_up(Call(tasks), dlse.unsqueeze(-1), _ones_for_values(saved))
        found = [grad.to(t.dtype) for grad, t in zip(dqkv, given, strict=True)] + [None] * (3 - len(given))
        return None, *found, *(grad.to(t.dtype) for grad, t in zip(dcaptured, captured, strict=True))


def _own_lse(call: Call, saved: Sequence[Tensor | None], num_heads: int) -> Tensor:
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
