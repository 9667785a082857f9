"""Time per element of random numbers that don't depend on the layout, relative to torch's CPU generator.

    python benchmarks/randomness.py [--elements 4194304] [--rounds 7]

The two run alternately in one process, with one thread each, and the best of several rounds counts. "columns" is the
part of one rank of a matrix that is sharded by columns over 8 ranks, so it consists of many short runs of elements.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from longmesh.spec import Layout, MeshShape, Shard
from longmesh.tensor import distributions
from longmesh.tensor.distributions import Distribution
from longmesh.tensor.random import sample

Torch = Callable[[torch.Tensor], Any]

CASES: list[tuple[str, torch.dtype, Distribution, Torch]] = [
    ("uniform", torch.float32, distributions.uniform(torch.float32), lambda t: t.uniform_()),
    ("uniform", torch.float64, distributions.uniform(torch.float64), lambda t: t.uniform_()),
    ("uniform", torch.bfloat16, distributions.uniform(torch.bfloat16), lambda t: t.uniform_()),
    ("normal", torch.float32, distributions.normal(torch.float32), lambda t: t.normal_()),
    ("normal", torch.float64, distributions.normal(torch.float64), lambda t: t.normal_()),
    ("bernoulli (dropout)", torch.float32, distributions.bernoulli(0.9), lambda t: t.bernoulli_(0.9)),
    ("exponential", torch.float32, distributions.exponential(torch.float32), lambda t: t.exponential_()),
    ("integers", torch.int64, distributions.integers(0, 1000), lambda t: t.random_(0, 1000)),
]


def best_ns(fns: list[Callable[[], Any]], elements: int, rounds: int) -> list[float]:
    """Nanoseconds an element of each, the best of alternating rounds."""
    best = [math.inf] * len(fns)
    for _ in range(rounds):
        for which, fn in enumerate(fns):
            start = time.perf_counter()
            fn()
            best[which] = min(best[which], (time.perf_counter() - start) / elements * 1e9)
    return best


def measure(case: tuple[str, torch.dtype, Distribution, Torch], elements: int, rounds: int) -> list[float]:
    """ns an element: torch, ours over whole rows, ours over short pieces of columns."""
    _, dtype, distribution, fill = case
    device = torch.device("cpu")
    one, eight = MeshShape((1,)), MeshShape((8,))
    plain = torch.empty(elements, dtype=dtype)
    rows = (elements // 1024, 1024)
    columns = (elements // 128, 1024)
    return best_ns(
        [
            lambda: fill(plain),
            lambda: sample(distribution, (0, 0), Layout(one, [Shard(0)]), rows, (0,), dtype, device),
            lambda: sample(distribution, (0, 0), Layout(eight, [Shard(1)]), columns, (3,), dtype, device),
        ],
        elements,
        rounds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--elements", type=int, default=1 << 20)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(title="random numbers on the CPU, one thread (ratio: ours / torch, lower is better)")
    for heading in ("distribution", "dtype", "torch ns", "ours ns", "ratio", "columns ns", "ratio"):
        table.add_column(heading, justify="left" if heading in ("distribution", "dtype") else "right")
    ratios: list[float] = []
    for case in CASES:
        theirs, ours, columns = measure(case, options.elements, options.rounds)
        ratios.append(ours / theirs)
        name = str(case[1]).removeprefix("torch.")
        figures = (theirs, ours, ours / theirs, columns, columns / theirs)
        table.add_row(case[0], name, *(f"{figure:.2f}" for figure in figures))
    Console(width=100).print(table)
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    print(f"geometric mean of the first ratio: {mean:.2f}")


if __name__ == "__main__":
    main()
