"""How long ranks take to talk to each other: the links of a `Cluster`, measured over one axis of a mesh.

Collective: every rank of the group measures the same, and gets the same figures.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from longmesh.attention.execute.route import to_rows
from longmesh.comm import AxisGroup, collectives
from longmesh.comm.p2p import start_all_to_all, start_send_receive
from longmesh.plan.cluster import Level, Link

Run = Callable[[], object]
Make = Callable[[], Run]

LOOP_S = 0.006  # what is shorter is repeated until it takes this long: a clock of single calls shows outliers
LOOPS, ROUNDS, MEETINGS = 2, 3, 8
AGAIN, SLACK = 20, 1.3  # measured again so often; times that differ by less are as good as equal
FIRST_BYTES, MOST_BYTES = 1 << 20, 1 << 27  # of a transfer that takes as long as computing
ROWS = (16, 256, 2048, 8192)  # of 8 heads of 64, packed to find out what a copy takes
COLD_BYTES, MOST_COPIES = 1 << 26, 64  # more than caches hold


def find_disturbed(took_us: Sequence[float]) -> list[int]:
    """Which calls, in rising order of size, took clearly longer than a larger one. Pure."""
    return [i for i, us in enumerate(took_us) if us > SLACK * min(took_us[i:])]


class Clock:
    """Times that are the same on every rank of a group: from when the first rank begins to when the last has ended.

    Pitfall: ranks that share cores may run one after the other, each as fast as if it were alone. So no rank's own time
    is taken.
    """

    def __init__(self, group: AxisGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self._meeting_us = 0.0  # what it takes to begin and to end together, which is no part of a time
        self._meeting_us = min(self._loop(lambda: None, 1) for _ in range(MEETINGS))

    def time_us(self, run: Run) -> float:
        """Microseconds of a call while every rank makes it. Collective."""
        return self.best_us([lambda: run])[0]

    def best_us(self, makes: Sequence[Make]) -> list[float]:
        """The same of several calls, each the best of its rounds. A round goes over all calls: what slows a machine
        down for seconds then meets a round of each, and no call's only one."""
        rounds = [[self._round(make()) for make in makes] for _ in range(ROUNDS)]
        return [min(times) for times in zip(*rounds, strict=True)]

    def rising_us(self, makes: Sequence[Make]) -> list[float]:
        """The same of calls in rising order of size. One that takes longer than a larger one was disturbed, and is
        measured again, a few times; what remains is for the caller to judge. Collective."""
        took = self.best_us(makes)
        for _ in range(AGAIN):
            disturbed = find_disturbed(took)
            if not disturbed:
                break
            again = self.best_us([makes[i] for i in disturbed])
            for i, us in zip(disturbed, again, strict=True):
                took[i] = min(took[i], us)
        return took

    def _round(self, run: Run) -> float:
        count = max(1, min(400, int(LOOP_S * 1e6 / max(1.0, self._loop(run, 1)))))
        return min(self._loop(run, count) for _ in range(LOOPS if count > 1 else 1))

    def alone_us(self, run: Run) -> float:
        """The same while the other ranks wait for the first. Collective; `run` must not be."""
        count = 3 if self.group.rank == 0 else 0
        return min(self._loop(run, count) for _ in range(LOOPS * ROUNDS))

    def _loop(self, run: Run, count: int) -> float:
        self.slowest(0.0)
        start = time.perf_counter()
        for _ in range(count):
            run()
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize()
        self.slowest(0.0)
        took = max(1e-3, (time.perf_counter() - start) * 1e6 - self._meeting_us)
        return self.slowest(took / count if count else 0.0)

    def slowest(self, us: float) -> float:
        """The largest of the ranks' numbers."""
        if self.group.size == 1:
            return us
        mine = torch.tensor([us]).to(self.device)
        return float(collectives.all_reduce(mine, reduce_op="max", group=self.group))


def measure_level(clock: Clock, name: str, ranks: int | None, messages: Sequence[int]) -> Level:
    """Every collective by the bytes that a rank receives."""
    links: dict[str, Link] = {}
    for kind in _KINDS:
        took = [0.0] * len(messages)
        if clock.group.size > 1:
            make = _maker(clock.group, kind)
            took = clock.rising_us(
                [lambda size=size, make=make: make(size, clock.device) for size in messages]
            )
        links[kind] = Link(_rising([(float(size), us) for size, us in zip(messages, took, strict=True)]))
    return Level(name, ranks, links["all_gather"], tuple(links.items()))


_KINDS = ("all_gather", "all_to_all", "all_reduce", "reduce_scatter", "send")


def _maker(group: AxisGroup, kind: str) -> Callable[[int, torch.device], Run]:
    """What makes a call in which this rank receives so many bytes."""
    n, me = group.size, group.rank

    def make(size: int, device: torch.device) -> Run:
        part = max(1, size // 4 // max(1, n - 1))  # elements of each peer
        if kind == "send":
            counts = [size // 4 if member == (me + 1) % n else 0 for member in range(n)]
            coming = [size // 4 if member == (me - 1) % n else 0 for member in range(n)]
            sent = torch.ones((size // 4, 1), device=device)
            return lambda: start_send_receive(
                sent, send_counts=counts, recv_counts=coming, group=group
            ).wait()
        if kind == "all_gather":
            one = torch.ones(part, device=device)
            return lambda: collectives.all_gather(one, group=group)
        if kind == "all_reduce":
            half = torch.ones(max(1, part * n // 2), device=device)
            return lambda: collectives.all_reduce(half, reduce_op="sum", group=group)
        counts = [0 if member == me else part for member in range(n)]
        rows = torch.ones((part * (n - 1), 1), device=device)
        whole = torch.ones(part * n, device=device)
        if kind == "all_to_all" or (kind == "reduce_scatter" and group.is_gloo):  # a sum of rows there

            def run() -> Tensor:
                found = start_all_to_all(rows, send_counts=counts, recv_counts=counts, group=group).wait()
                return found if kind == "all_to_all" else found.view(n - 1, -1).sum(0)

            return run
        return lambda: collectives.reduce_scatter(whole, reduce_op="sum", group=group)

    return make


def _rising(points: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Times that never fall as messages grow: no message takes longer than a larger one, it was only disturbed."""
    least = list(itertools.accumulate((us for _, us in reversed(points)), min))[::-1]
    return tuple((size, us) for (size, _), us in zip(points, least, strict=True))


def measure_copies(clock: Clock, dtype: torch.dtype) -> Link:
    """The time in which rows are packed, by their bytes. As in a call, neither what is copied nor the place that it is
    copied to lies in a cache any more: many are copied in turn, and a result is kept until its turn comes again, since
    the next one would lie where it lay."""
    sizes = [dtype.itemsize * 8 * rows * 64 for rows in ROWS]
    many = [max(1, min(MOST_COPIES, COLD_BYTES // size)) for size in sizes]

    def maker(rows: int, count: int) -> Make:
        def make() -> Run:
            tokens = [torch.ones(1, 8, rows, 64, device=clock.device, dtype=dtype) for _ in range(count)]
            kept = [to_rows(t) for t in tokens]

            def run() -> None:
                for i, t in enumerate(tokens):
                    kept[i] = to_rows(t)

            return run

        return make

    took = clock.best_us([maker(rows, count) for rows, count in zip(ROWS, many, strict=True)])
    return Link(_rising([(float(size), us / n) for size, us, n in zip(sizes, took, many, strict=True)]))


def measure_overlap(clock: Clock, compute: Run) -> float:
    """How much of a transfer hides behind computing that takes about as long."""
    n, me = clock.group.size, clock.group.rank
    if n == 1:
        return 1.0
    alone, size = clock.time_us(compute), FIRST_BYTES
    while True:
        sent = torch.zeros((size // 4, 1), device=clock.device)
        counts = [len(sent) if member == (me + 1) % n else 0 for member in range(n)]
        coming = [len(sent) if member == (me - 1) % n else 0 for member in range(n)]

        def transfer(
            between: Run = lambda: None,
            sent: Tensor = sent,
            counts: list[int] = counts,
            coming: list[int] = coming,
        ) -> None:
            pending = start_send_receive(sent, send_counts=counts, recv_counts=coming, group=clock.group)
            between()
            pending.wait()

        took = clock.time_us(transfer)  # the same on every rank, and so is what follows from it
        if took >= alone or size >= MOST_BYTES:
            break
        size *= 2
    alone, took, both = clock.best_us([lambda: compute, lambda: transfer, lambda: lambda: transfer(compute)])
    return min(1.0, max(0.0, (alone + took - both) / min(alone, took)))
