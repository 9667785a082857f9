"""Predicted against measured times of attention calls on CPU ranks, over masks, layouts, exchanges and lengths.

    python benchmarks/predict.py [--ranks 2 4] [--repeat 5]

The cluster is measured first, by the same ranks. Each case is a forward and a backward, 8 heads of 64 in fp32, the
slowest rank's median; the cases of a mask and a length run in turn. `error` is |predicted / measured - 1|. Exchanges
are ranked rightly if of two whose measured times differ by more than TIE the predicted ones differ the same way.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time

import torch

from longmesh.attention import ContextParallel, masks
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
EXCHANGES = ("sparse", "ring", "allgather", "ulysses")
LAYOUTS = ("zigzag", "solve")
LENGTHS = (1024, 2048)


def measure(num_ranks: int) -> Cluster:
    from longmesh.debug.measure_cluster import measure_cluster

    return measure_cluster(cpu_mesh(num_ranks))


def run_cases(
    num_ranks: int, length: int, mask: str, cluster: Cluster, repeat: int
) -> list[tuple[str, str, float, float]]:
    """(layout, exchange, predicted, measured) in milliseconds, the measured ones of this rank."""
    mesh = cpu_mesh(num_ranks)
    engines, inputs = [], []
    for layout, exchange in itertools.product(LAYOUTS, EXCHANGES):
        cp = ContextParallel(
            mesh,
            seq_len=length,
            mask=MASKS[mask](length),
            layout=layout,
            exchange=exchange,
            cluster=cluster,
            check=False,
        )
        engines.append((layout, exchange, cp))
        inputs.append([torch.randn(1, 8, cp.num_tokens, 64, requires_grad=True) for _ in range(3)])
    took: list[list[float]] = [[] for _ in engines]
    for turn in range(repeat + 1):
        for (_, _, cp), qkv, times in zip(engines, inputs, took, strict=True):
            torch.distributed.barrier()
            start = time.perf_counter()
            cp(*qkv).sum().backward()
            if turn:
                times.append((time.perf_counter() - start) * 1e3)
    found = []
    for (layout, exchange, cp), times in zip(engines, took, strict=True):
        found.append((layout, exchange, cp.plan.predict().total_us / 1e3, statistics.median(times)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicted against measured times of attention calls.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    errors: list[float] = []
    right = pairs = 0
    print("ranks tokens mask     layout   exchange    predicted   measured  ratio")
    with RankPool(max(options.ranks)) as pool:
        for num_ranks in options.ranks:
            cluster = pool.run(measure, num_ranks, ranks=num_ranks, timeout=120.0)[0]
            print(f"{num_ranks} ranks: {cluster.overlap:.2f} of a transfer hides behind computing")
            for length, mask in itertools.product(LENGTHS, MASKS):
                args = (num_ranks, length, mask, cluster, options.repeat)
                by_rank = pool.run(run_cases, *args, ranks=num_ranks, timeout=120.0)
                cases = []
                for each in zip(*by_rank, strict=True):
                    layout, exchange, predicted, _ = each[0]
                    measured = max(case[3] for case in each)
                    cases.append((layout, predicted, measured))
                    errors.append(abs(predicted / measured - 1))
                    what = f"{num_ranks:5d} {length:6d} {mask:8} {layout:8} {exchange:10}"
                    ratio = predicted / measured
                    print(f"{what} {predicted:7.1f} ms {measured:7.1f} ms {ratio:6.2f}", flush=True)
                for (one, p, m), (other, q, n) in itertools.combinations(cases, 2):
                    if one == other and max(m, n) > (1 + TIE) * min(m, n):
                        pairs += 1
                        right += (p < q) == (m < n)
    print(f"median error {statistics.median(errors):.1%} of {len(errors)} calls")
    print(f"{right} of {pairs} pairs of exchanges ranked rightly ({right / max(pairs, 1):.0%})")


if __name__ == "__main__":
    main()
