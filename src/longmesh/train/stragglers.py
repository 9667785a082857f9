"""Ranks that compute longer than others: a slow processor, a hot card, another program on the host.

The time of a step tells nothing: it is the same on all ranks, since they wait for each other. What counts is a step
minus what a rank waited in it.
"""

from __future__ import annotations

import json
import socket
import statistics
import sys
from collections.abc import Sequence

from longmesh.comm import World

EVERY = 10
FACTOR = 1.5
# Below that per step it is noise, whatever the ratio.
LEAST_S = 0.005


class Stragglers:
    """Compares the ranks every few steps and names a slow one, once. `lines` is what was said, on every rank."""

    def __init__(self, every: int = EVERY) -> None:
        self._every, self._world = every, World()
        self._busy: list[float] = []
        self._named: set[int] = set()
        self.lines: list[str] = []

    def add(self, step: int, busy_seconds: float) -> None:
        """This rank's own time in a step. Collective every few steps: every rank of the world."""
        self._busy.append(busy_seconds)
        if self._world.size == 1 or len(self._busy) < self._every:
            return
        mine = [socket.gethostname(), statistics.median(self._busy)]
        self._busy.clear()
        rows = [json.loads(text) for text in self._world.gather(json.dumps(mine))]
        busy = [seconds for _, seconds in rows]
        for rank in find_slow(busy):
            if rank not in self._named:
                self._named.add(rank)
                usual = max(statistics.median_low(busy), 1e-9)
                self.lines.append(
                    f"rank {rank} on host {rows[rank][0]} is slow: it computes {busy[rank]:.3g} s a step where the "
                    f"median is {usual:.3g} s ({busy[rank] / usual:.1f} times, up to step {step + 1}); the others wait "
                    "for it"
                )
                if self._world.rank == 0:
                    print(self.lines[-1], file=sys.stderr, flush=True)


def find_slow(busy: Sequence[float]) -> list[int]:
    """The ranks that take 1.5 times the median. Of two ranks the faster one is the measure. Pure."""
    usual = statistics.median_low(busy)
    return [r for r, seconds in enumerate(busy) if seconds > FACTOR * usual and seconds - usual > LEAST_S]
