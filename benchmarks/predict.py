"""Predicted and measured times of attention on CPU ranks, for many masks, layouts, exchanges and lengths.

    python benchmarks/predict.py [--ranks 2 4] [--repeat 6] [--results predict.json]

The same ranks first measure the cluster, as `longmesh doctor --save` does. Each case is a forward and a backward pass
with 8 heads of 64 in fp32. All cases run once to warm up, and then in several rounds. `measured` is the time from the
start of the first rank to the end of the last, in the best round; the cluster is measured in the same way, so that
other processes disturb neither. `error` is |predicted / measured - 1|. The table shows predicted / measured
milliseconds.

Two exchanges are ranked rightly if their predicted times have the same order as their measured times. Pairs whose
measured times differ by at most TIE are counted separately. They count only if the even rounds and the odd rounds
agree on which of the two is faster.

One number of ranks takes less than two minutes. With `--results`, an interrupted run continues where it stopped.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from longmesh.attention import ContextParallel, masks
from longmesh.cli.doctor.measure_cluster import measure_cluster
from longmesh.plan import Cluster
from longmesh.testing import RankPool
from longmesh.testing.mesh import cpu_mesh

TIE = 0.1  # of the faster one's time: who takes the wrong one of closer ones loses little
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
) -> list[tuple[float, list[tuple[float, float, float]]]]:
    """For each case the predicted time in ms, and when this rank began, was between forward and backward, and ended,
    turn by turn, in seconds of the clock that all ranks of a host have."""
    engines = [engine(num_ranks, *case, cluster) for case in cases]
    inputs = {n: [torch.randn(1, 8, n, 64) for _ in range(4)] for n in {cp.num_tokens for cp in engines}}
    took: list[list[tuple[float, float, float]]] = [[] for _ in engines]
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
                times.append((start, between, time.perf_counter()))
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
        turns = [together_ms(turn) for turn in zip(*(times for _, times in each), strict=True)]
        rows.append({"ranks": num_ranks, **case._asdict()})
        rows[-1] |= {"predicted": each[0][0], "measured": min(turns), "turns": turns}
    return {"cluster": dataclasses.asdict(cluster), "rows": rows}


def together_ms(by_rank: Sequence[tuple[float, float, float]]) -> float:
    """From when the first rank began to when the last had ended: ranks that share cores may run one after the other."""
    return 1e3 * (max(end for _, _, end in by_rank) - min(start for start, _, _ in by_rank))


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
    far: list[bool] = []
    close: list[bool] = []
    alike: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        alike.setdefault((row["ranks"], row["tokens"], row["mask"], row["layout"]), []).append(row)
    for a, b in itertools.chain.from_iterable(itertools.combinations(cases, 2) for cases in alike.values()):
        is_right = (a["predicted"] < b["predicted"]) == (a["measured"] < b["measured"])
        times = a["measured"], b["measured"]
        if max(times) > (1 + TIE) * min(times):
            far.append(is_right)
        elif is_told_apart(a["turns"], b["turns"]):
            close.append(is_right)
    return (
        f"median error {statistics.median(errors):.1%} of {len(rows)} calls; {sum(far)} of {len(far)} pairs of "
        f"exchanges ranked rightly ({sum(far) / max(len(far), 1):.1%}), of closer ones {sum(close)} of {len(close)}"
    )


def is_told_apart(turns: Sequence[float], others: Sequence[float]) -> bool:
    """Whether the best of every second turn and the best of those between order two cases alike."""
    halves = [(min(turns[half::2]), min(others[half::2])) for half in (0, 1)]
    return len({mine < theirs for mine, theirs in halves}) == 1


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
