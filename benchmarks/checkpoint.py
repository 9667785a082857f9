"""Time of background saves relative to blocking saves, and the cost of the trainer's safety checks.

    python benchmarks/checkpoint.py [--mib 400] [--saves 6] [--seq-len 16384]

Two ranks hold half of the state each. `Directory.save` copies the state into host memory, and a thread writes it;
`save` returns when everything is on disk. The two run alternately. The first save of each is listed separately,
because it allocates the memory and makes the plan. Of the later saves the shortest counts, because other processes
share the cores and the disk. A step is a few matrix products and one all-reduce; steps during a save are compared
with steps before it.

A train step has three safety checks (guards): it computes the norms of the gradients, sets a flag for bad numbers and
reads it one step later, and polls the checkpoints. Each is timed in a loop on the trainer's model, and compared with
whole steps. So is the comparison of replicas (--check-replicas).
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from longmesh import DTensor, Shard
from longmesh.checkpoint import Directory, save
from longmesh.testing import RankPool, cpu_mesh
from longmesh.train.data import Corpus
from longmesh.train.loop import build, run_step
from longmesh.train.number_checks import StepNumbers, agree_on_bad, check_replicas, gradient_norms
from longmesh.train.options import TrainOptions
from longmesh.train.parallel import Engines, slice_mesh
from longmesh.train.progress import StepJournal, say_nothing

NUM_TENSORS = 64
STEPS_BESIDE = 10


class Spent(NamedTuple):
    """Seconds of a call: by the clock, and of the processor for the thread that called."""

    wall: float
    cpu: float


class Saves(NamedTuple):
    """What each save took on one rank."""

    blocking: list[Spent]
    call: list[Spent]  # of a save beside the training
    step: list[float]  # alone
    step_beside: list[float]  # while a save is written


def spent(work: Callable[[], object]) -> Spent:
    wall, cpu = time.perf_counter(), time.thread_time()
    work()
    return Spent(time.perf_counter() - wall, time.thread_time() - cpu)


def timed(work: Callable[[], object]) -> float:
    return spent(work).wall


def measure_saves(path: str, mib: int, saves: int) -> Saves:
    mesh = cpu_mesh(2)
    rows = mib * (1 << 20) // 4 // NUM_TENSORS // 1024 // 2
    state = {
        f"w{number}": DTensor.from_local(torch.randn(rows, 1024), mesh, [Shard(0)])
        for number in range(NUM_TENSORS)
    }
    matrix, flag = torch.randn(512, 512), torch.zeros(1)

    def step() -> None:
        for _ in range(4):
            matrix.mm(matrix)
        dist.all_reduce(flag)

    directory = Directory(Path(path, "beside"), keep=1)
    found = Saves([], [], [], [])
    for number in range(saves):
        dist.barrier()
        found.blocking.append(spent(lambda: save(state, Path(path, "blocking"))))
        dist.barrier()
        found.step.extend(timed(step) for _ in range(STEPS_BESIDE))
        dist.barrier()
        found.call.append(spent(lambda number=number: directory.save(state, number)))
        for _ in range(STEPS_BESIDE):
            found.step_beside.append(timed(step))
            directory.poll()
        directory.flush()
    return found


class Guards(NamedTuple):
    """Seconds on one rank: a step, and the parts of it that are there to be safe."""

    step: float
    norms: float
    flag: float
    poll: float
    replicas: float


def repeated(work: Callable[[], object], times: int = 20) -> float:
    return statistics.median(timed(work) for _ in range(times))


def measure_guards(path: str, seq_len: int) -> Guards:
    options = TrainOptions(context=2, seq_len=seq_len, out=path)
    axes = slice_mesh(cpu_mesh(*options.mesh_shape, names=("data", "context", "tensor")))
    model, optimizer = build(options, axes)
    sequences = Corpus(0).steps(seq_len, 1, first=0)
    engines = Engines(options, axes)
    run_step(model, optimizer, next(sequences), options, axes, engines)
    step = repeated(lambda: run_step(model, optimizer, next(sequences), options, axes, engines), 3)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    norms, loss = gradient_norms(model), torch.tensor(1.0)
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    directory, ledger = Directory(Path(path, "guards")), StepJournal(model, [], [], say_nothing)
    numbers = StepNumbers(loss, torch.zeros(()), norms)
    dist.barrier()
    return Guards(
        step,
        repeated(lambda: gradient_norms(model)),
        repeated(lambda: agree_on_bad(loss, torch.linalg.vector_norm(flat), axes)),
        repeated(lambda: (directory.poll(), ledger.add(0, numbers, 1.0, 0.0))),
        repeated(lambda: check_replicas(model, axes, 1)),
    )


def describe_saves(ranks: list[Saves], mib: int) -> tuple[Table, str]:
    """The table of saves, by the slower rank each time, and what is said of the steps."""

    def slower(name: str) -> list[Spent]:
        return [
            Spent(*map(max, zip(*calls, strict=True)))
            for calls in zip(*(getattr(r, name) for r in ranks), strict=True)
        ]

    def shortest(calls: list[Spent]) -> Spent:
        return Spent(*map(min, zip(*calls, strict=True)))

    blocking, calls = slower("blocking"), slower("call")
    whole = shortest(blocking[1:])
    table = Table(title=f"{mib} MiB on 2 ranks")
    for heading in ("", "s in the call", "share", "s of the processor"):
        table.add_column(heading, justify="right")
    for name, found in (
        ("save", whole),
        ("Directory.save, the first", calls[0]),
        ("Directory.save, later", shortest(calls[1:])),
    ):
        table.add_row(name, f"{found.wall:.3f}", f"{found.wall / whole.wall:.1%}", f"{found.cpu:.3f}")
    alone, beside = (
        statistics.median(t for r in ranks for t in getattr(r, name)) for name in ("step", "step_beside")
    )
    return table, f"a step of {alone * 1e3:.1f} ms takes {beside / alone:.2f} times as long beside a save"


def describe_guards(ranks: list[Guards], seq_len: int) -> list[str]:
    step, norms, flag, poll, replicas = [max(x) for x in zip(*ranks, strict=True)]
    total = norms + flag + poll
    parts = f"norms {norms / step:.3%}, flag {flag / step:.3%}, reading and polling {poll / step:.3%}"
    of = f"a train step of {step * 1e3:,.0f} ms ({seq_len:,} tokens)"
    return [
        f"guards: {total * 1e3:.2f} ms of {of}: {total / step:.2%} ({parts})",
        f"--check-replicas: {replicas * 1e3:.2f} ms each time, {replicas / step:.2%} of a step",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("mib", 400), ("saves", 6), ("seq-len", 16384)):
        parser.add_argument(f"--{name}", type=int, default=default)
    told = parser.parse_args()
    path = tempfile.mkdtemp()
    try:
        with RankPool(2) as pool:
            saves = pool.run(measure_saves, path, told.mib, told.saves, ranks=2, timeout=600)
            guards = pool.run(measure_guards, path, told.seq_len, ranks=2, timeout=600)
    finally:
        shutil.rmtree(path)
    console = Console()
    table, steps = describe_saves(saves, told.mib)
    console.print(table)
    for line in [steps, *describe_guards(guards, told.seq_len)]:
        console.print(line, soft_wrap=True)


if __name__ == "__main__":
    main()
