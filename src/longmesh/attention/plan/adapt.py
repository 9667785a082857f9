"""A plan for other head counts with the same layout: positions that were handed out stay valid."""

from __future__ import annotations

import dataclasses
from typing import Any

from longmesh.attention.mask.slices import stride_slices
from longmesh.attention.plan.api import head_shares, plan_attention
from longmesh.attention.plan.attention_plan import AttentionPlan, RowPlan
from longmesh.attention.plan.schedule import make_schedule


def adapt_plan(
    plan: AttentionPlan, num_heads: int, num_kv_heads: int, head_dim: int, dtype_bytes: int, request: dict[str, Any]
) -> AttentionPlan:  # fmt: skip
    """The best plan for these heads if it cuts the sequence as `plan` does; else `plan`'s cut and exchange.

    `request`: the arguments that `plan` was made with.
    """
    if (num_heads, num_kv_heads, head_dim, dtype_bytes) == _heads(plan):
        return plan
    heads = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "dtype_bytes": dtype_bytes,
    }
    again: dict[str, Any] = request | heads | {"layout": plan.layout}
    fresh = plan_attention(**again)
    pairs = zip(plan.rows, fresh.rows, strict=True)
    if all(_cut(old) == _cut(new) for old, new in pairs):
        return fresh
    counts = num_heads, num_kv_heads, head_dim * dtype_bytes
    shares = head_shares(plan.exchange, plan.inner, plan.outer, plan.seq_len, *counts)
    rows: list[RowPlan] = []
    for number, row in enumerate(plan.rows):
        grouped = row.schedule.ownership
        slices = plan.mask.slices(plan.seq_len, row=number, num_heads=num_heads)
        if grouped.stride != 1:
            slices = stride_slices(slices, grouped.stride, plan.seq_len)
        schedule = make_schedule(slices, grouped, plan.exchange)
        rows.append(RowPlan(row.ownership, schedule, row.inner, shares))
    return dataclasses.replace(plan, rows=tuple(rows), passed_over=(), **heads)


def _cut(row: RowPlan) -> tuple:
    return row.ownership.pieces, row.ownership.stride


def _heads(plan: AttentionPlan) -> tuple[int, int, int, int]:
    return plan.num_heads, plan.num_kv_heads, plan.head_dim, plan.dtype_bytes
