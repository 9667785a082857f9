"""Tokens per second of the trainer on 2 ranks x 1 thread relative to one process x 2 threads.

    python benchmarks/train.py [--seq-len 16384] [--steps 3] [--dim 128] [--layers 2] [--heads 4] [--kv-heads 2]

The one process uses torch's own attention, document by document, and nothing of ours. Both sides run the same steps
alternately, and the ratio is the median over steps, because sequences differ and other processes share the cores.
Planning is included.

The share outside the model's kernels is the part of a rank's step that is not spent in aten ops of forward and
backward on its main thread: planning, Python, waiting and the optimizer. It is the median over steps. Other processes
may slow down one rank, and then the other rank waits. So the CPU time of the ranks, which does not include waiting,
shows how even the work is.

The guards keep a run safe: asking whether to stop, comparing the ranks' times, and the watchdog. Their share of a
step is measured in CPU time over many calls. For the watchdog, it is the CPU time that it adds to a rank that does
nothing else.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from longmesh import stop_requested
from longmesh.comm import observe_comm
from longmesh.testing import RankPool, cpu_mesh
from longmesh.train.data import Corpus
from longmesh.train.loop import WaitClock, build, run_step
from longmesh.train.options import TrainOptions
from longmesh.train.parallel import Axes, Engines, slice_mesh
from longmesh.train.stragglers import Stragglers
from longmesh.watch import watch

WATCHED_S = 5.0
AXES = ("data", "context", "tensor")


def make_stepper(options: TrainOptions, axes: Axes) -> Callable[[], float]:
    """A function that runs the next step and gives its loss."""
    model, optimizer = build(options, axes)
    steps = Corpus(options.seed).steps(options.seq_len, options.batch, first=0)
    engines = Engines(options, axes)
    return lambda: float(run_step(model, optimizer, next(steps), options, axes, engines)[0].loss)


@functools.cache
def rank_stepper(options: TrainOptions) -> Callable[[], float]:
    """This rank's stepper, made once."""
    return make_stepper(options, slice_mesh(cpu_mesh(*options.mesh_shape, names=AXES)))


def timed(step: Callable[[], float]) -> tuple[float, float]:
    """Seconds of a step, and its loss."""
    start = time.perf_counter()
    loss = step()
    return time.perf_counter() - start, loss


def rank_step(options: TrainOptions) -> tuple[float, float]:
    return timed(rank_stepper(options))


class Shares(NamedTuple):
    """Of a step on one rank: outside the model's kernels, waiting for others, and the processor's seconds for it."""

    outside: float
    waiting: float
    cpu_seconds: float


def rank_shares(options: TrainOptions) -> Shares:
    clock, started = WaitClock(), time.process_time()
    with profile(activities=[ProfilerActivity.CPU]) as profiler, observe_comm(clock):
        seconds, _ = timed(rank_stepper(options))
    used = time.process_time() - started
    return Shares(1.0 - kernel_seconds(profiler.events()) / seconds, clock.seconds / seconds, used)


def rank_guards(calls: int = 300) -> tuple[float, float]:
    """Processor seconds of the guards: of one step, and of the watchdog in one second."""
    stop_requested()
    idle = idle_share()  # of gloo's own threads, which look at their sockets all the time
    with watch(300.0):
        stragglers = Stragglers()
        started = time.thread_time()
        for step in range(calls):
            stop_requested()
            stragglers.add(step, 1.0)
        a_step = (time.thread_time() - started) / calls
        return a_step, max(0.0, idle_share() - idle)


def idle_share() -> float:
    """The processor's share of the time for what runs beside the main thread."""
    started = time.process_time()
    time.sleep(WATCHED_S)
    return (time.process_time() - started) / WATCHED_S


def describe_guards(found: list[tuple[float, float]], seconds: float) -> str:
    a_step, a_second = (max(values) for values in zip(*found, strict=True))
    share = a_step / seconds + a_second
    return f"guards: {a_step * 1e3:.2f} ms a step and {a_second:.2%} of the time, {share:.2%} of {seconds:.2f} s a step"


def describe_shares(steps: list[list[Shares]]) -> list[str]:
    """What is said of the shares, which are by step and rank."""
    ranks = list(zip(*steps, strict=True))
    told = ", ".join(
        f"{statistics.median(s.outside for s in rank):.1%} "
        f"(waiting {statistics.median(s.waiting for s in rank):.1%})"
        for rank in ranks
    )
    apart = statistics.median(max(x) / min(x) - 1 for x in ([s.cpu_seconds for s in step] for step in steps))
    return [
        f"outside the model's kernels, by rank: {told} of a step",
        f"processor time of the ranks: {apart:.1%} apart",
    ]


def kernel_seconds(events: Any) -> float:
    """The time in aten ops of the main thread, but for those of the optimizer."""
    updates = [event for event in events if event.name.startswith("Optimizer.step")]
    (update,) = updates
    return sum(
        event.self_cpu_time_total / 1e6
        for event in events
        if event.name.startswith("aten::")
        and event.thread == update.thread
        and not update.time_range.start <= event.time_range.start <= update.time_range.end
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (
        ("seq-len", 16384),
        ("steps", 3),
        ("dim", 128),
        ("layers", 2),
        ("heads", 4),
        ("kv-heads", 2),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    sizes = vars(parser.parse_args())
    with RankPool(2) as pool:  # before this process runs anything on two threads
        torch.set_num_threads(2)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        alone, cut = TrainOptions(**sizes), TrainOptions(context=2, **sizes)
        one_step = make_stepper(alone, slice_mesh(init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=AXES)))
        ones, twos = [], []
        for _ in range(alone.steps + 1):  # the first warms up
            ones.append(timed(one_step))
            twos.append(max(pool.run(rank_step, cut, ranks=2, timeout=600)))
        shares = [pool.run(rank_shares, cut, ranks=2, timeout=600) for _ in range(alone.steps)]
        guards = pool.run(rank_guards, ranks=2, timeout=120)
        dist.destroy_process_group()
    one, two = (statistics.median(seconds for seconds, _ in side[1:]) for side in (ones, twos))
    ratio = statistics.median(a / b for (a, _), (b, _) in zip(ones[1:], twos[1:], strict=True))
    difference = max(abs(a - b) for (_, a), (_, b) in zip(ones, twos, strict=True))
    table = Table(
        title=f"{alone.seq_len:,} tokens a step, packed documents, {alone.layers} layers of {alone.dim}"
    )
    for heading in ("", "s a step", "tokens/s", "ratio"):
        table.add_column(heading, justify="right")
    table.add_row("one process x 2 threads", f"{one:.3f}", f"{alone.seq_len / one:,.0f}", "1.00")
    table.add_row("2 ranks x 1 thread", f"{two:.3f}", f"{alone.seq_len / two:,.0f}", f"{ratio:.2f}")
    console = Console()
    console.print(table)
    for line in describe_shares(shares):
        console.print(line)
    console.print(describe_guards(guards, two))
    console.print(f"largest difference of the losses: {difference:.1e}")


if __name__ == "__main__":
    main()
