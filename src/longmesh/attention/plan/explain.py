"""A plan in words, for people: choices, then a line for each rank, then each stage."""

from collections.abc import Sequence

import numpy as np

from longmesh.attention.exchange.fragment import STAGE, START, STOP
from longmesh.attention.mask.slices import area
from longmesh.attention.plan import merge_tiles as tile
from longmesh.attention.plan.attention_plan import AttentionPlan, PassedOver, RowPlan
from longmesh.attention.plan.choose import fullest_buffers
from longmesh.attention.plan.predict import AS_FAST, MANY, SOME, Prediction, ranks_to_look_at
from longmesh.attention.plan.schedule import WHO
from longmesh.attention.plan.stats import RankStats, heads_of, rank_stats
from longmesh.plan.words import count, format_bytes

FEW_STAGES = 4  # that are shown of many, where many ranks pass keys on
MOST_ROWS = 4  # of a batch, whose busiest ranks are shown


def explain(plan: AttentionPlan) -> str:
    """Text of a few lines a rank; of many ranks or stages, some of them."""
    shown = _shown_ranks(plan)
    stats = rank_stats(plan, shown)
    areas = _areas(plan)
    mean = max(areas.mean(), 1e-9)
    shape = count(plan.num_ranks, "rank")
    if plan.inner > 1:
        shape = f"{count(plan.outer, 'group')} of {plan.inner} ranks"
    shares = plan.rows[0].shares
    groups = len(shares[0].groups) if shares else 1
    two = plan.kv_layout is not None
    lines = [
        f"attention over {plan.axes} on {shape}: {plan.mask}",
        f"  layout {plan.layout}{_of_keys(plan)}, exchange {plan.exchange}"
        + (f", {groups} groups of heads: one travels while another is computed" if groups > 1 else ""),
        f"  {plan.heads}, {plan.heads.dtype_bytes} bytes per element",
        *_time_lines(plan),
        f"  balance: busiest rank {areas.max() / mean:.3f} times the mean, {areas.sum():,.0f} pairs in all",
        _traffic_line(plan, stats),
        f"  rank   tokens{'     keys' * two}           pairs  of mean   received       sent    peak KV  calls",
    ]
    for s in stats:
        lines.append(
            f"  {s.rank:4d} {s.tokens:8d}{f' {s.kv_tokens:8d}' * two} {s.area:15,.0f} {s.area / mean:8.3f}"
            f" {format_bytes(s.received_bytes):>10} {format_bytes(s.sent_bytes):>10}"
            f" {format_bytes(s.peak_kv_bytes):>10} {s.kernel_calls:6d}"
        )
    if shown is not None:
        lines.append(f"  ... {plan.num_ranks - len(shown)} more ranks: stats() has them all")
    for number, row in enumerate(plan.rows):
        if len(plan.rows) > 1:
            lines.append(f"  batch row {number}")
        lines += _stage_lines(row, shown)
    return "\n".join(lines)


def _shown_ranks(plan: AttentionPlan) -> list[int] | None:
    """Some of many ranks, the busiest among them; None: all."""
    if plan.num_ranks <= MANY:
        return None
    groups = {group for row in plan.rows[:MOST_ROWS] for group in ranks_to_look_at(row.schedule)}
    if plan.outer <= MANY:  # few groups of many ranks
        groups = set(range(0, plan.outer, -(-plan.outer // SOME)))
    return sorted(group * plan.inner for group in groups)


def _areas(plan: AttentionPlan) -> np.ndarray:
    """The pairs that each rank computes, in all heads' worth."""
    total = np.zeros(plan.num_ranks)
    for row in plan.rows:
        rows = row.schedule.rows
        pairs = np.bincount(rows[:, WHO], weights=area(rows), minlength=plan.outer)
        heads = [heads_of(plan, row, rank).heads / plan.heads.num_heads for rank in range(plan.inner)]
        total += (pairs[:, None] * np.array(heads)).ravel()
    return total


def _traffic_line(plan: AttentionPlan, stats: Sequence[RankStats]) -> str:
    ring = plan.kv_len * (plan.num_ranks - 1) * len(plan.rows)
    times = plan.num_ranks / len(stats)
    received = times * sum(s.received_tokens for s in stats)
    sent = format_bytes(int(times * sum(s.received_bytes for s in stats)))
    about = "about " * (times > 1)
    return (
        f"  traffic: {about}{sent} received in all, {100 * received / max(ring, 1):.1f}% of a full ring's keys and "
        "values"
    )


def _of_keys(plan: AttentionPlan) -> str:
    return "" if plan.kv_layout is None else f" of queries and {plan.kv_layout} of keys"


def _time_lines(plan: AttentionPlan) -> list[str]:
    """What is predicted, and why not otherwise."""
    chosen = plan.predict()
    forward, backward = chosen
    times = [f"{human_us(p.total_us)} ({human_us(p.compute_us)} computing)" for p in (forward, backward)]
    lines = [f"  predicted on {plan.cluster}, batch of 1: forward {times[0]}, backward {times[1]}"]
    for other in _rivals(plan):
        names = [f"layout {other.layout}"] * (other.layout != plan.layout)
        names += [f"exchange {other.exchange}"] * (other.exchange != plan.exchange)
        name = " with ".join(names)
        ratio = other.prediction.total_us / max(chosen.total_us, 1e-9)
        if ratio <= AS_FAST:
            lines.append(
                f"  {name} is predicted to take as long, within {AS_FAST - 1:.0%}, with buffers of "
                f"{format_bytes(other.buffer_bytes)} against {format_bytes(fullest_buffers(plan))}"
            )
        else:
            lines.append(f"  {name} would take {ratio:.2f}x: {_why_slower(chosen, other.prediction)}")
    return lines


def _rivals(plan: AttentionPlan) -> list[PassedOver]:
    """Of each layout and each exchange that was not taken, the fastest pair, by time."""
    seen_layouts, seen_exchanges = [plan.layout], [plan.exchange]
    found: list[PassedOver] = []
    for other in plan.passed_over:
        if other.layout not in seen_layouts or other.exchange not in seen_exchanges:
            found.append(other)
        seen_layouts.append(other.layout)
        seen_exchanges.append(other.exchange)
    return found


def _why_slower(plan: Prediction, other: Prediction) -> str:
    ours, theirs = (
        tuple(sum(part) for part in zip(*p, strict=True)) for p in (plan, other)
    )  # (total, compute) of both passes
    waits = [total - compute for total, compute in (ours, theirs)]
    if theirs[1] - ours[1] >= waits[1] - waits[0]:
        return f"its slowest rank computes {human_us(theirs[1])} instead of {human_us(ours[1])}, both passes together"
    return f"it waits and copies {human_us(waits[1])} instead of {human_us(waits[0])}, both passes together"


def human_us(us: float) -> str:
    """1536.0 -> '1.5 ms'."""
    if us < 1000:
        return f"{us:.0f} us"
    return f"{us / 1e3:.1f} ms" if us < 1e6 else f"{us / 1e6:.2f} s"


def _stage_lines(row: RowPlan, shown: Sequence[int] | None) -> list[str]:
    """For each stage and group: what arrives and which blocks run."""
    s = row.schedule
    who = "rank" if row.inner == 1 else "group"
    groups = range(s.ownership.num_ranks) if shown is None else sorted({rank // row.inner for rank in shown})
    work = {group: (s.tiles(group), s.received(group)) for group in groups}
    lines: list[str] = []
    stages = list(range(s.num_stages))
    if shown is not None and len(stages) > FEW_STAGES:
        stages = [*range(FEW_STAGES - 1), s.num_stages - 1]
    for stage in stages:
        kind = "own keys" if s.is_local(stage) else s.exchange.arrival
        if stage == s.num_stages - 1 > len(stages) - 1:
            lines.append(f"  ... {s.num_stages - len(stages)} more stages")
        lines.append(f"  stage {stage}: {kind}")
        for group, (tiles, f) in work.items():
            mine = tiles[tiles[:, tile.STAGE] == stage]
            f = f[f[:, STAGE] == stage]
            tokens = int((f[:, STOP] - f[:, START]).sum())
            if tokens or len(mine):
                arrives = f"{count(tokens, 'key')} arrive{'s' * (tokens == 1)}, " if tokens else ""
                done = f"{count(len(mine), 'block')}, {count(int(area(mine).sum()), 'pair')}"
                lines.append(f"    {who} {group}: {arrives}{done}")
    moved = int((s.queries[:, STOP] - s.queries[:, START]).sum())
    if moved:
        lines.append(f"  queries computed on other ranks: {moved:,}; their results are sent back and merged")
    return lines
