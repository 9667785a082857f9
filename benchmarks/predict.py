"""Predicted against measured times of attention calls on CPU ranks, over masks, layouts, exchanges and lengths.

    python benchmarks/predict.py [--ranks 2 4] [--repeat 6] [--results predict.json]

The cluster is measured first, by the same ranks: what `longmesh doctor --save` writes. Each case is a forward and a
backward, 8 heads of 64 in fp32; all cases run in turn, after one turn to warm up. `measured` is the slowest rank's time
in the best of the turns, as the cluster's figures are: what a machine slows down by for seconds is in neither. `error`
is |predicted / measured - 1|. Exchanges are ranked rightly if of two whose measured times differ by more than TIE the
predicted ones differ the same way. The table has predicted / measured milliseconds.

A number of ranks takes less than two minutes. With `--results` a run that is broken off goes on with those that are
missing there.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from longmesh.attention import ContextParallel, masks
from longmesh.debug.measure_cluster import measure_cluster
from longmesh.plan import Cluster
from longmesh.testing import RankPool
from longmesh.testing.mesh import cpu_mesh

TIE = 0.1  # of the faster one's time: closer ones are not told apart by the clock either
MASKS = {
    "causal": lambda n: masks.causal(),
    "full": lambda n: masks.full(),
    "window": lambda n: masks.sliding_window(n // 8),
    "packed": lambda n: masks.documents([n // 2, n // 4, n // 8, n - n // 2 - n // 4 - n // 8]),
}
EXCHANGES = ("sparse", "ring", "allgather", "ulysses", "hybrid")  # hybrid: on two axes
LAYOUTS = ("contiguous", "zigzag", "solve")
LENGTHS = (1024, 2000)


def measure(num_ranks: int) -> Cluster:
    return measure_cluster(cpu_mesh(num_ranks))


def engine(
    num_ranks: int, length: int, mask: str, layout: str, exchange: str, cluster: Cluster
) -> ContextParallel:
    mesh = cpu_mesh(num_ranks // 2, 2) if exchange == "hybrid" else cpu_mesh(num_ranks)
    return ContextParallel(
        mesh,
        seq_len=length,
        mask=MASKS[mask](length),
        layout=layout,
        exchange=exchange,
        cluster=cluster,
        check=False,
    )


class Case(NamedTuple):
    tokens: int
    mask: str
    layout: str
    exchange: str


def run_cases(
    num_ranks: int, cases: list[Case], cluster: Cluster, repeat: int
) -> list[tuple[float, list[tuple[float, float]]]]:
    """For each case the predicted time, and this rank's times of forward and backward, turn by turn, in ms."""
    engines = [engine(num_ranks, *case, cluster) for case in cases]
    inputs = {n: [torch.randn(1, 8, n, 64) for _ in range(4)] for n in {cp.num_tokens for cp in engines}}
    took: list[list[tuple[float, float]]] = [[] for _ in engines]
    for turn in range(repeat + 1):
        for cp, times in zip(engines, took, strict=True):
            *qkv, dout = inputs[cp.num_tokens]
            leaves = [t.requires_grad_() for t in qkv]
            torch.distributed.barrier()
            start = time.perf_counter()
            out = cp(*leaves)
            between = time.perf_counter()
            torch.autograd.grad(out, leaves, dout)
            if turn:
                times.append(((between - start) * 1e3, (time.perf_counter() - between) * 1e3))
    predicted = [cp.plan.predict().total_us / 1e3 for cp in engines]
    return list(zip(predicted, took, strict=True))


def run_ranks(num_ranks: int, repeat: int) -> dict[str, Any]:
    """The cluster of so many ranks, and a row for each case."""
    exchanges = EXCHANGES if num_ranks % 2 == 0 and num_ranks > 2 else EXCHANGES[:4]
    cases = [Case(*case) for case in itertools.product(LENGTHS, MASKS, LAYOUTS, exchanges)]
    rows: list[dict[str, Any]] = []
    with RankPool(num_ranks) as pool:
        cluster = pool.run(measure, num_ranks, timeout=120.0)[0]
        by_rank = pool.run(run_cases, num_ranks, cases, cluster, repeat, timeout=600.0)
    for case, each in zip(cases, zip(*by_rank, strict=True), strict=True):
        turns = list(zip(*(times for _, times in each), strict=True))
        best = min(turns, key=lambda turn: max(map(sum, turn)))
        rows.append(
            {"ranks": num_ranks, **case._asdict(), "predicted": each[0][0], "measured": max(map(sum, best))}
            | {"by_rank": best, "turns": [max(map(sum, turn)) for turn in turns]}
        )
    return {"cluster": dataclasses.asdict(cluster), "rows": rows}


def show(found: dict[str, Any]) -> None:
    cluster = found["cluster"]
    first = found["rows"][0]["ranks"]
    print(
        f"{first} ranks: {cluster['overlap']:.2f} of a transfer hides behind computing, a rank computes "
        f"{cluster['crowding']:.2f} times as fast while the others wait"
    )
    exchanges = list(dict.fromkeys(row["exchange"] for row in found["rows"]))
    print("ranks tokens mask     layout     " + " ".join(f"{name:>13}" for name in exchanges))
    lines: dict[str, list[str]] = {}
    for row in found["rows"]:
        what = f"{row['ranks']:5d} {row['tokens']:6d} {row['mask']:8} {row['layout']:10}"
        lines.setdefault(what, []).append(f"{row['predicted']:5.1f} / {row['measured']:5.1f}")
    for what, times in lines.items():
        print(what, *(f"{text:>13}" for text in times))


def judge(rows: list[dict[str, Any]]) -> str:
    """The median error, and the share of pairs of exchanges that are ranked rightly."""
    errors = [abs(row["predicted"] / row["measured"] - 1) for row in rows]
    right = pairs = 0
    alike: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
    for row in rows:
        key = row["ranks"], row["tokens"], row["mask"], row["layout"]
        alike.setdefault(key, []).append((row["predicted"], row["measured"]))
    for cases in alike.values():
        for (p, m), (q, n) in itertools.combinations(cases, 2):
            if max(m, n) > (1 + TIE) * min(m, n):
                pairs += 1
                right += (p < q) == (m < n)
    return (
        f"median error {statistics.median(errors):.1%} of {len(rows)} calls; "
        f"{right} of {pairs} pairs of exchanges ranked rightly ({right / max(pairs, 1):.1%})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicted against measured times of attention calls.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repeat", type=int, default=6)
    parser.add_argument(
        "--results", type=Path, help="keep what was measured there, and go on with what is missing"
    )
    options = parser.parse_args()
    found: dict[str, Any] = {}
    if options.results is not None and options.results.exists():
        found = json.loads(options.results.read_text())
    for num_ranks in options.ranks:
        if str(num_ranks) not in found:
            found[str(num_ranks)] = run_ranks(num_ranks, options.repeat)
            if options.results is not None:
                options.results.write_text(json.dumps(found))
        show(found[str(num_ranks)])
        print(f"{num_ranks} ranks: {judge(found[str(num_ranks)]['rows'])}", flush=True)
    print("all: " + judge([row for num_ranks in options.ranks for row in found[str(num_ranks)]["rows"]]))


if __name__ == "__main__":
    main()
