"""CPU time and memory of planning for many ranks, without cached plans.

    python benchmarks/plan_scale.py [--repeat 3]

`causal` is one sequence of 1 Mi tokens with a zigzag layout and 8 heads of 64. `packed` are the documents of
benchmarks/layout.py with the layout `solve`, the mean of four packed rows. `ordered` are the same documents with
consecutive tokens on each rank, as recurrent layers need them. `cross` are 1 Mi queries that see 64 Ki other keys
(`kv_len`).

`plan` is the time of plan_attention, and `route` the time that one rank needs to derive its own calls from the plan;
the best of the repetitions. `memory` is the most by which the process has grown. `area` is the work of the busiest
rank divided by the mean, and `received` the bytes sent as a share of a full ring's keys and values.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

import numpy as np
from layout import DRAWS, pack

Ranks = int | tuple[int, int]  # groups of the first that split heads, and how many groups
CASES: dict[str, tuple[str, Ranks, int, str, str]] = {
    "causal, 1024 ranks, sparse": ("causal", 1024, 1 << 20, "zigzag", "sparse"),
    "causal, 1024 ranks, ring": ("causal", 1024, 1 << 20, "zigzag", "ring"),
    "causal, 1024 ranks, auto": ("causal", 1024, 1 << 20, "auto", "auto"),
    "causal, 128 x 8 ranks, hybrid": ("causal", (8, 128), 1 << 20, "zigzag", "hybrid"),
    "causal, 256 ranks, cheapest": ("causal", 256, 1 << 20, "contiguous", "cheapest"),
    "cross, 1024 ranks, sparse": ("cross", 1024, 1 << 20, "contiguous", "sparse"),
    "cross, 1024 ranks, cheapest": ("cross", 1024, 1 << 20, "contiguous", "cheapest"),
    "cross, 1024 ranks, auto": ("cross", 1024, 1 << 20, "auto", "auto"),
    "packed, 64 ranks, 1 Mi tokens": ("packed", 64, 1 << 20, "solve", "sparse"),
    "packed, 256 ranks, 1 Mi tokens": ("packed", 256, 1 << 20, "solve", "sparse"),
    "packed, 1024 ranks, 4 Mi tokens": ("packed", 1024, 4 << 20, "solve", "sparse"),
    "ordered, 256 ranks, 1 Mi tokens": ("ordered", 256, 1 << 20, "ordered", "sparse"),
}


def measure(case: str, repeat: int) -> dict[str, float]:
    """The figures of one case, in this process."""
    from longmesh.attention import masks, plan_attention
    from longmesh.attention.execute.route import BoundRow
    from longmesh.attention.plan import api, cut

    kind, ranks, seq_len, layout, exchange = CASES[case]
    figures: list[dict[str, float]] = []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    memory = 0.0
    packs = [(seed, draw) for seed in range(2) for draw in DRAWS.values()]
    inner, outer = ranks if isinstance(ranks, tuple) else (1, ranks)
    num_ranks, middle = inner * outer, inner * outer // 2
    members, peers = range(outer), range(middle // inner * inner, middle // inner * inner + inner)
    is_packed = kind in ("packed", "ordered")
    for seed, draw in packs if is_packed else packs[:1]:
        mask = masks.full() if kind == "cross" else masks.causal()
        mask = masks.documents(pack(seed, seq_len, draw)) if is_packed else mask
        how = {"layout": layout, "exchange": exchange, "kv_len": (1 << 16) if kind == "cross" else None}
        plan_s = route_s = float("inf")
        for _ in range(repeat):
            for cached in (*vars(api).values(), *vars(cut).values()):
                if hasattr(cached, "cache_clear"):
                    cached.cache_clear()
            start = time.process_time()
            plan = plan_attention(seq_len=seq_len, ranks=ranks, mask=mask, **how)
            planned = time.process_time()
            BoundRow(plan.rows[0], middle, members, peers)
            done = time.process_time()
            if done - start < plan_s + route_s:
                plan_s, route_s = planned - start, done - planned
        memory = max(memory, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
        figures.append({"plan": plan_s, "route": route_s})
        if exchange == "sparse":  # the figures of a ring are its pairs of ranks
            stats = plan.stats()
            areas = [s.area for s in stats]
            figures[-1]["area"] = max(areas) * num_ranks / sum(areas)
            figures[-1]["received"] = sum(s.received_tokens for s in stats) / (plan.kv_len * (num_ranks - 1))
    return {name: float(np.mean([f[name] for f in figures])) for name in figures[0]} | {"memory": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description="Planning for many ranks: time and memory.")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--case", choices=list(CASES), help="measure one case and print it as JSON")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(options.case, options.repeat)))
        return
    print(f"{'case':34} {'plan s':>8} {'route s':>8} {'both s':>8} {'memory':>8} {'area':>7} {'received':>8}")
    for case in CASES:
        command = [sys.executable, __file__, "--case", case, "--repeat", str(options.repeat)]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        quality = f"{found['area']:7.3f} {found['received']:8.1%}" if "area" in found else ""
        print(
            f"{case:34} {found['plan']:8.3f} {found['route']:8.3f} {found['plan'] + found['route']:8.3f} "
            f"{found['memory']:5.0f} MB {quality}",
            flush=True,
        )


if __name__ == "__main__":
    main()
