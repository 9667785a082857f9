"""Balance, traffic and planning time of layouts for packed documents.

    python benchmarks/layout.py [--packs 12]

Document lengths are heavy-tailed, and at most a quarter of the sequence. `area` is the work of the busiest rank divided
by the mean. `received` is the bytes of all keys, values, queries and partial results that ranks receive, as a share of
a full ring's keys and values. `plan` is the CPU time of `plan_attention` without a cached plan, the best of three.
"""

import argparse
import time

import numpy as np

from longmesh.attention import AttentionPlan, masks, plan_attention
from longmesh.attention.plan import api, cut

DRAWS = {
    "pareto": lambda rng: (rng.pareto(1.0) + 1) * 300,
    "lognormal": lambda rng: np.exp(rng.normal(5.5, 2.0)),
}
LAYOUTS = ("contiguous", "ordered", "zigzag", "per_document", "round_robin", "solve")


def pack(seed: int, seq_len: int, draw) -> list[int]:
    """Lengths of documents that fill the sequence."""
    rng, lengths, left = np.random.default_rng(seed), [], seq_len
    while left:
        lengths.append(max(1, min(int(draw(rng)), seq_len // 4, left)))
        left -= lengths[-1]
    return lengths


def measure(lengths: list[int], ranks: int, layout: str, dtype_bytes: int) -> tuple[float, float, float, int]:
    """(max/mean area, received share, milliseconds, spread of tokens) of one pack."""
    seq_len, best = sum(lengths), float("inf")

    def plan_cold() -> AttentionPlan:
        for cached in (*vars(api).values(), *vars(cut).values()):
            if hasattr(cached, "cache_clear"):
                cached.cache_clear()
        return plan_attention(
            seq_len=seq_len,
            ranks=ranks,
            mask=masks.documents(lengths),
            layout=layout,
            exchange="sparse",
            chunk=512,
            dtype_bytes=dtype_bytes,
        )

    plan = plan_cold()
    for _ in range(3):
        start = time.process_time()
        plan = plan_cold()
        best = min(best, time.process_time() - start)
    stats = plan.stats()
    areas, tokens = [s.area for s in stats], [s.tokens for s in stats]
    received = sum(s.received_tokens for s in stats) / (seq_len * (ranks - 1))
    return max(areas) * ranks / sum(areas), received, best * 1e3, max(tokens) - min(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description="Layouts over packed documents, side by side.")
    parser.add_argument("--packs", type=int, default=12)
    packs = parser.parse_args().packs
    print(
        f"{'documents':10} {'tokens':>8} {'ranks':>5} {'layout':13} {'bytes':>5} "
        f"{'area':>6} {'worst':>6} {'received':>8} {'worst':>6} {'plan ms':>8} {'spread':>6}"
    )
    for tokens, ranks, layouts, count in (
        (1 << 16, 8, LAYOUTS, packs),
        (1 << 20, 64, ("solve",), max(1, packs // 4)),
    ):
        for name, draw in DRAWS.items():
            for layout in layouts:
                for size in (2, 4) if layout == "solve" else (4,):
                    figures = np.array(
                        [measure(pack(seed, tokens, draw), ranks, layout, size) for seed in range(count)]
                    )
                    area, received, ms, _ = figures.mean(axis=0)
                    worst = figures.max(axis=0)
                    print(
                        f"{name:10} {tokens:8d} {ranks:5d} {layout:13} {size:5d} {area:6.3f} {worst[0]:6.3f} "
                        f"{received:8.1%} {worst[1]:6.1%} {ms:8.1f} {int(worst[3]):6d}"
                    )


if __name__ == "__main__":
    main()
