"""A plan in words, for people: choices, then a line for each rank, then each stage."""

import numpy as np

from longmesh.attention.exchange.fragment import START, STOP
from longmesh.attention.mask.slices import area
from longmesh.attention.plan import merge_tiles as tile
from longmesh.attention.plan.attention_plan import AttentionPlan, RowPlan


def human_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def explain(plan: AttentionPlan) -> str:
    """Text of a few lines a rank."""
    stats = plan.stats()
    areas = np.array([s.area for s in stats])
    mean = max(areas.mean(), 1e-9)
    ring = plan.seq_len * (plan.num_ranks - 1) * len(plan.rows)
    received = sum(s.received_tokens for s in stats)
    sent = human_bytes(sum(s.received_bytes for s in stats))
    ratio = 100 * received / max(ring, 1)
    heads = f"{plan.num_heads} heads, {plan.num_kv_heads} key heads of {plan.head_dim}"
    shape = f"{plan.num_ranks} ranks" if plan.inner == 1 else f"{plan.outer} groups of {plan.inner} ranks"
    shares = plan.rows[0].shares
    groups = len(shares[0].groups) if shares else 1
    lines = [
        f"attention over {plan.seq_len} tokens on {shape}: {plan.mask}",
        f"  layout {plan.layout}, exchange {plan.exchange}"
        + (f", {groups} groups of heads: one travels while another is computed" if groups > 1 else ""),
        f"  {heads}, {plan.dtype_bytes} bytes an element",
        f"  balance: busiest rank {areas.max() / mean:.3f} of the mean area, {areas.sum():.0f} pairs in all",
        f"  traffic: {sent} received in all, {ratio:.1f}% of a full ring's keys and values",
        "  rank   tokens         area  of mean   received       sent  peak KV  calls",
    ]
    for s in stats:
        lines.append(
            f"  {s.rank:4d} {s.tokens:8d} {s.area:12.0f} {s.area / mean:8.3f}"
            f" {human_bytes(s.received_bytes):>10} {human_bytes(s.sent_bytes):>10}"
            f" {human_bytes(s.peak_kv_bytes):>8} {s.kernel_calls:6d}"
        )
    for number, row in enumerate(plan.rows):
        if len(plan.rows) > 1:
            lines.append(f"  batch row {number}")
        lines += _stage_lines(row)
    return "\n".join(lines)


def _stage_lines(row: RowPlan) -> list[str]:
    """For each stage and group: what arrives and which blocks run."""
    s = row.schedule
    who = "rank" if row.inner == 1 else "group"
    tiles, kept = s.all_tiles(), s.all_stretches
    pairs = area(tiles)
    lines: list[str] = []
    for stage in range(s.num_stages):
        kind = (
            "own keys"
            if s.is_local(stage)
            else "passed on by the rank before"
            if s.relay
            else "received keys"
        )
        lines.append(f"  stage {stage}: {kind}")
        for rank in range(s.ownership.num_ranks):
            arrived = (kept.rank == rank) & (kept.stage == stage)
            mine = (tiles[:, tile.RANK] == rank) & (tiles[:, tile.STAGE] == stage)
            tokens = int((kept.stop - kept.start)[arrived].sum())
            if tokens or mine.any():
                arrives = f"{tokens} keys arrive, " if tokens else ""
                lines.append(
                    f"    {who} {rank}: {arrives}{int(mine.sum())} blocks of {int(pairs[mine].sum())} pairs"
                )
    moved = int((s.queries[:, STOP] - s.queries[:, START]).sum())
    if moved:
        lines.append(f"  {moved} queries are computed away from home; their results come back and are merged")
    return lines
