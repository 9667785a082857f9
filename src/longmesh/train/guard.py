"""What looks after a run while it trains: the watchdog, with more time for what takes longer, and signals."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

from longmesh.comm.stop import stop_requested
from longmesh.watch import Watch, watch

# The first step makes groups and plans; saving and loading wait for disks.
LONGER = 3
FIRST_STEP = "first step"


class Guard:
    """Used by the loop. This one lets a run alone: for tests and benchmarks."""

    def section(self, name: str) -> AbstractContextManager[None]:
        """Around what may take longer than a step."""
        return contextlib.nullcontext()

    def stop_requested(self) -> bool:
        """Whether to save and leave. Collective: every rank of the world."""
        return False


class WatchedGuard(Guard):
    """With the watchdog."""

    def __init__(self, watching: Watch, timeout: float) -> None:
        self._watching, self._timeout = watching, timeout
        self.has_started = False

    def stop_requested(self) -> bool:
        return stop_requested()

    def section(self, name: str) -> AbstractContextManager[None]:
        self.has_started = self.has_started or name == FIRST_STEP
        return self._watching.section(name, timeout=LONGER * self._timeout)


@contextlib.contextmanager
def guarded(timeout: float) -> Iterator[WatchedGuard]:
    """Inside, a rank that keeps others waiting for `timeout` seconds ends the run. For every rank of the world."""
    with watch(timeout) as watching:
        yield WatchedGuard(watching, timeout)
