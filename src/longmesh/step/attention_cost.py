"""Attention of a step on a mesh: the plans that would run, their times, bytes and buffers."""

from __future__ import annotations

import functools
from typing import NamedTuple

from longmesh.attention.exchange.fragment import OWNER, RANK, START, STOP
from longmesh.attention.mask.base import Mask
from longmesh.attention.mask.document import documents
from longmesh.attention.plan.api import plan_attention
from longmesh.attention.plan.attention_plan import AttentionPlan
from longmesh.attention.plan.head_sizes import HeadSizes
from longmesh.attention.plan.stats import heads_of, rank_stats, sent_fragments, swapped_elements
from longmesh.plan.cluster import Cluster
from longmesh.step.setting import StepMachine, StepMesh, StepOptions
from longmesh.step.trace import AttentionCall

MANY = 64  # ranks, above which a few stand for all


class AttentionCost(NamedTuple):
    """Of the calls of one layer, one row of the batch. `sent` and `sent_backward`: bytes that the busiest rank sends;
    `buffer` and `buffer_backward`: bytes of others' keys that are there at once; `tokens`: of the fullest rank."""

    plans: tuple[AttentionPlan, ...]
    forward_us: float
    backward_us: float
    forward_compute_us: float
    backward_compute_us: float
    sent: float
    sent_backward: float
    buffer: float
    buffer_backward: float
    tokens: int


def cost_attention(
    calls: tuple[AttentionCall, ...],
    seq_len: int,
    mesh: StepMesh,
    machine: StepMachine,
    options: StepOptions,
    layout: str,
) -> AttentionCost:
    """What the attention of a layer costs on this mesh."""
    cluster = machine.cluster.every(mesh.tp)
    parts = [
        (
            _cost(
                call.mask, call.heads, seq_len, mesh.cp, cluster, options.exchange, options.lengths, layout
            ),
            call.times,
        )
        for call in calls
    ]

    def total(name: str) -> float:
        return sum(getattr(cost, name) * times for cost, times in parts)

    def most(name: str) -> float:
        return max((getattr(cost, name) for cost, _ in parts), default=0.0)

    return AttentionCost(
        plans=tuple(plan for cost, _ in parts for plan in cost.plans),
        forward_us=total("forward_us"),
        backward_us=total("backward_us"),
        forward_compute_us=total("forward_compute_us"),
        backward_compute_us=total("backward_compute_us"),
        sent=total("sent"),
        sent_backward=total("sent_backward"),
        buffer=most("buffer"),
        buffer_backward=most("buffer_backward"),
        tokens=int(most("tokens")) or -(-seq_len // mesh.cp),
    )


@functools.lru_cache(maxsize=1024)
def _cost(
    mask: Mask, heads: HeadSizes, seq_len: int, ranks: int, cluster: Cluster, exchange: str, lengths: tuple[int, ...],
    layout: str,
) -> AttentionCost:  # fmt: skip
    seen = mask if not lengths else documents(list(lengths)) & mask
    plan = plan_attention(
        seq_len=seq_len,
        ranks=ranks,
        mask=seen,
        layout=layout,
        exchange=exchange,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        v_head_dim=heads.v_head_dim,
        v_in_k=heads.v_in_k,
        dtype_bytes=heads.dtype_bytes,
        cluster=cluster,
    )
    took = plan.predict()
    shown = None if ranks <= MANY else (0, ranks // 2, ranks - 1)
    stats = rank_stats(plan, shown)
    held = max(s.peak_kv_bytes - s.kv_tokens * _own_key_bytes(plan, s.rank) for s in stats)
    back = max(backward_sent_bytes(plan, s.rank) for s in stats)
    return AttentionCost(
        plans=(plan,),
        forward_us=took.forward.total_us,
        backward_us=took.backward.total_us,
        forward_compute_us=took.forward.compute_us,
        backward_compute_us=took.backward.compute_us,
        sent=float(max(s.sent_bytes for s in stats)),
        sent_backward=float(back),
        buffer=float(held),
        buffer_backward=float(held * (1 + heads.wide_bytes / heads.dtype_bytes)),
        tokens=max(s.tokens for s in stats),
    )


def _own_key_bytes(plan: AttentionPlan, rank: int) -> int:
    """Of one of its own keys, in the heads that a rank attends with; those of a group are its own, too."""
    mine = heads_of(plan, plan.rows[0], rank)
    return (
        mine.kv_heads
        * plan.heads.kv_dim
        * plan.heads.dtype_bytes
        * (plan.inner if plan.rows[0].shares else 1)
    )


def backward_sent_bytes(plan: AttentionPlan, rank: int) -> int:
    """Bytes that a rank sends in backward: its keys again, gradients of the keys that it was sent, in fp32."""
    total = 0
    sizes = plan.heads
    for row in plan.rows:
        schedule, group = row.schedule, rank // plan.inner
        mine = heads_of(plan, row, rank)
        element = sum(mine.kv_heads_of_groups) * sizes.kv_dim
        received = schedule.received(group)
        arrived = int((received[:, STOP] - received[:, START]).sum())
        lent = sent_fragments(schedule, group)
        left = int((lent[:, STOP] - lent[:, START]).sum())
        total += element * (left * sizes.dtype_bytes + arrived * sizes.wide_bytes)
        moved = schedule.queries[:, STOP] - schedule.queries[:, START]
        home, there = (int(moved[schedule.queries[:, column] == group].sum()) for column in (OWNER, RANK))
        wide = (sizes.v_head_dim + 1) * sizes.wide_bytes
        total += mine.heads * (home * 2 * wide + there * sizes.head_dim * sizes.wide_bytes)
        if row.shares:
            swapped = swapped_elements(plan, row, rank)
            total += swapped.output_back * sizes.dtype_bytes + swapped.qkv_in * sizes.wide_bytes
    return total
