"""How long a plan takes, estimated: over the stages, the longer of computing one and bringing the next.

    compute   | stage 0 | stage 1    | stage 2 |
    transfer  | stage 1   | stage 2 |               cost = sum of max(compute of i, transfer of i + 1)

Only ratios matter: `auto` compares plans, it promises no time. The defaults are those of a machine where
a pair in one head of 64 takes as long as 8 bytes.
"""

import dataclasses

import numpy as np

from longmesh.attention.exchange.fragment import RANK, START, STOP
from longmesh.attention.exchange.ulysses import HeadShare
from longmesh.attention.mask.slices import area
from longmesh.attention.plan import merge_tiles as tile
from longmesh.attention.plan.attention_plan import AttentionPlan, RowPlan
from longmesh.attention.plan.stats import rank_stats


@dataclasses.dataclass(frozen=True)
class CostModel:
    flops_per_us: float = 50_000.0
    bytes_per_us: float = 2_000.0
    call_us: float = 50.0
    transfer_us: float = 50.0
    packing: float = 0.25  # of the time that the bytes take to travel


def cost_us(plan: AttentionPlan, model: CostModel | None = None) -> float:
    """Estimated time of a forward pass: that of the slowest rank."""
    model = model or CostModel()
    return sum(_row_cost(plan, row, model) for row in plan.rows)


def _row_cost(plan: AttentionPlan, row: RowPlan, model: CostModel) -> float:
    s, tiles, kept = row.schedule, row.schedule.all_tiles(), row.schedule.all_stretches
    shape = (s.ownership.num_ranks, s.num_stages + 1)
    share = 1.0 / plan.inner
    compute, bring = np.zeros(shape), np.zeros(shape)
    flops = 4.0 * area(tiles) * plan.num_heads * plan.head_dim * share
    np.add.at(
        compute, (tiles[:, tile.RANK], tiles[:, tile.STAGE]), flops / model.flops_per_us + model.call_us
    )
    token = 2 * plan.num_kv_heads * plan.head_dim * plan.dtype_bytes * share / model.bytes_per_us
    size = (kept.stop - kept.start) * token
    np.add.at(bring, (kept.rank, kept.stage), size)
    bring[:, 1:] += model.transfer_us * (bring[:, 1:].max(axis=0) > 0)
    away = s.queries[:, STOP] - s.queries[:, START]
    query = plan.num_heads * plan.head_dim * plan.dtype_bytes * share / model.bytes_per_us
    np.add.at(bring[:, min(1, shape[1] - 1)], s.queries[:, RANK], away * query)
    # Transfers go on while a rank computes, so a rank waits for bytes, never for another's kernels.
    slowest = np.maximum(compute[:, :-1], bring[:, 1:]).sum(axis=1).max()
    return _with_swaps(plan, row.shares, float(slowest), model) if row.shares else float(slowest)


def _with_swaps(
    plan: AttentionPlan, shares: tuple[HeadShare, ...], attend_us: float, model: CostModel
) -> float:
    """With the all-to-alls of split heads, which overlap with attention but for those of a group of heads.

    What travels is packed and unpacked besides, which overlaps with nothing.
    """
    groups = len(shares[0].groups)
    received = max(s.received_bytes for s in rank_stats(plan))
    swap_us = received / model.bytes_per_us
    exposed = min(attend_us, swap_us) / groups + model.packing * swap_us + 2 * model.transfer_us
    return max(attend_us, swap_us) + exposed + (groups - 1) * model.call_us
