"""What travels between queries and keys of two lengths: bytes recorded against bytes planned, and the scheme that was
chosen against all keys or all queries travelling.

    python benchmarks/serve_schemes.py

`scheme_rows` gives the two rows for the table of serve.py.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

from longmesh.attention import AttentionPlan, ContextParallel, masks, plan_attention
from longmesh.comm import record_comm
from longmesh.testing import RankPool, cpu_mesh

# Query heads, key heads, head dim, value dim, whether values are a part of keys: Llama 8B, 405B, MLA, as many heads.
HEADS = (
    (32, 8, 128, 128, False),
    (128, 8, 128, 128, False),
    (128, 1, 576, 512, True),
    (16, 16, 64, 64, False),
)
NEW = (1, 4, 16, 64, 256, 1024, 4096)
CACHED = (0, 1, 100, 1000, 10_000, 100_000)
RANKS = (2, 3, 8)
EXCHANGES = ("ring", "allgather", "sparse", "ulysses", "cheapest")


class Row(NamedTuple):
    """A row of the table: what was measured, its worst value, and the bar."""

    name: str
    value: float
    bar: str


def scheme_rows(pool: RankPool | None = None) -> list[Row]:
    """Both rows. Starts ranks of its own unless it is given a pool of three."""
    own = RankPool(3) if pool is None else None
    try:
        recorded = (pool or own).run(recorded_over_planned, ranks=3, timeout=120.0)  # type: ignore[union-attr]
    finally:
        if own is not None:
            own.close()
    off = max((ratio for of_rank in recorded for ratio in of_rank), key=lambda ratio: abs(ratio - 1))
    return [
        Row("recorded bytes / planned, the one furthest from 1", off, "exactly 1"),
        Row(
            "bytes of the chosen scheme / min(all keys, all queries travel), worst", worst_choice(), "<= 1.00"
        ),
    ]


def recorded_over_planned() -> list[float]:
    """For each exchange and pair of lengths, what this rank sent in a forward over what the plan says. Collective."""
    found = []
    for exchange, (T, K) in itertools.product(EXCHANGES, ((1, 700), (37, 211), (300, 100), (64, 64))):
        for H, G, D, E, inside in ((4, 2, 8, 8, False), (6, 1, 8, 4, True), (4, 4, 8, 6, False)):
            cp = ContextParallel(
                cpu_mesh(3), seq_len=T, kv_len=K, exchange=exchange, layout="contiguous", num_heads=H,
                num_kv_heads=G, head_dim=D, v_head_dim=E, v_in_k=inside,
                check=False,
            )  # fmt: skip
            q, k = torch.randn(1, H, cp.num_tokens, D), torch.randn(1, G, cp.num_kv_tokens, D)
            given = (q, k) if inside else (q, k, torch.randn(1, G, cp.num_kv_tokens, E))
            cp(*given)  # ranks agree at the first call
            with record_comm() as log:
                cp(*given)
            planned = cp.plan.stats()[cp.rank].sent_bytes
            found.append(log.total_bytes / planned if planned else 1.0 + log.total_bytes)
    return found


def plans(
    new: int, cached: int, ranks: int, heads: tuple[int, int, int, int, bool]
) -> dict[str, AttentionPlan]:
    """T new tokens against P cached ones and themselves: by the chosen scheme, and with all keys travelling."""
    H, G, D, E, inside = heads
    return {
        exchange: plan_attention(
            seq_len=new, kv_len=new + cached, ranks=ranks, mask=masks.causal(), layout="contiguous",
            kv_layout="contiguous", exchange=exchange, num_heads=H, num_kv_heads=G, head_dim=D, v_head_dim=E,
            v_in_k=inside, dtype_bytes=2,
        )
        for exchange in ("cheapest", "sparse")
    }  # fmt: skip


def all_queries_bytes(plan: AttentionPlan) -> int:
    """Every query to every other rank with a key that it sees, and its partial result back, counted by definition."""
    row, offset = plan.rows[0], plan.q_offset
    first = [row.kv_ownership.positions(rank).min(initial=plan.kv_len) for rank in range(plan.num_ranks)]
    count = sum(
        int((row.positions(i) + offset >= first[j]).sum())
        for i, j in itertools.permutations(range(plan.num_ranks), 2)
        if row.kv_ownership.counts[j]
    )
    return count * (plan.heads.query_bytes + plan.heads.result_bytes)


def worst_choice() -> float:
    """The largest ratio over the grid; 1 where nothing travels."""
    worst = 0.0
    for new, cached, ranks, heads in itertools.product(NEW, CACHED, RANKS, HEADS):
        found = plans(new, cached, ranks, heads)
        chosen, keys = (sum(s.received_bytes for s in found[e].stats()) for e in ("cheapest", "sparse"))
        least = min(keys, all_queries_bytes(found["cheapest"]))
        worst = max(worst, chosen / least if least else 1.0 + chosen)
    return worst


if __name__ == "__main__":
    for row in scheme_rows():
        print(f"{row.name:70} {row.value:8.4f}   {row.bar}")
