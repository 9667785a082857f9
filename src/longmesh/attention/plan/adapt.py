"""A plan for other head counts with the same layout: positions that were handed out stay valid."""

from __future__ import annotations

import dataclasses
from typing import Any

from longmesh.attention.plan.api import head_shares, make_row, plan_attention, prices_of
from longmesh.attention.plan.attention_plan import AttentionPlan, RowPlan
from longmesh.attention.plan.cut import Asked, Cuts, slices_in
from longmesh.attention.plan.head_sizes import HeadSizes


def request_for(plan: AttentionPlan, heads: HeadSizes, request: dict[str, Any]) -> dict[str, Any]:
    """The arguments `request` that `plan` was made with, for other heads and the layout that was chosen."""
    return request | heads._asdict() | {"layout": plan.layout, "kv_layout": plan.kv_layout}


def adapt_plan(
    plan: AttentionPlan, heads: HeadSizes, request: dict[str, Any], known: AttentionPlan | None = None
) -> AttentionPlan:
    """The best plan for these heads if it cuts the sequence as `plan` does; else `plan`'s cut and exchange.

    `request`: the arguments that `plan` was made with; `known`: the best plan, if it was made ahead.
    """
    if heads == plan.heads:
        return plan
    fresh = plan_attention(**request_for(plan, heads, request)) if known is None else known
    pairs = zip(plan.rows, fresh.rows, strict=True)
    if all(_cut(old) == _cut(new) for old, new in pairs):
        return fresh
    shares = head_shares(plan.exchange, plan.inner, plan.outer, plan.axes, heads)
    prices = prices_of(heads, plan.cluster, plan.inner, plan.outer)
    rows: list[RowPlan] = []
    for number, row in enumerate(plan.rows):
        grouped = row.schedule.ownership, row.schedule.kv_ownership
        cuts = Cuts(row.ownership, grouped[0], row.kv_ownership, grouped[1])
        asked = Asked(plan.mask, plan.axes, number, heads.num_heads, 1, heads.query_cost)
        rows.append(make_row(cuts, slices_in(cuts, asked), plan.exchange, row.inner, shares, prices))
    return dataclasses.replace(plan, rows=tuple(rows), passed_over=(), heads=heads)


def _cut(row: RowPlan) -> tuple:
    return tuple((owned.pieces, owned.stride) for owned in (row.ownership, row.kv_ownership))
