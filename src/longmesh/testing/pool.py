"""A pool of local ranks that runs functions, for tests and experiments.

The ranks are processes that live as long as the pool: a call costs well under a millisecond, not the
seconds of starting Python and importing torch on each rank. Every world size has its own processes, made
when first used, because a process keeps its process groups and what is cached about them for life.

Pitfall: a function is sent by name. What it needs must be in its arguments or importable.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from longmesh.errors import LongmeshError
from longmesh.testing.nursery import Nursery
from longmesh.testing.shipping import name_function, pack_call, read_surroundings
from longmesh.testing.world import RankWorld

Result = TypeVar("Result")
_DEVICES = ("cpu", "sim", "sim+cpu", "fake")


class RankPool:
    """Up to `max_ranks` local CPU ranks.

    Make it early: this process is forked once, here, and must not have run threaded torch ops before.
    Close it, or use it in a `with` statement; its processes also end when this one does.

    >>> with RankPool(2) as pool:
    ...     pool.run(torch.distributed.get_rank, ranks=2)
    [0, 1]
    """

    def __init__(self, max_ranks: int) -> None:
        if max_ranks < 1:
            raise LongmeshError(f"RankPool(max_ranks={max_ranks}): a pool has at least 1 rank")
        if not hasattr(os, "fork"):
            raise LongmeshError("RankPool forks its ranks, which this platform cannot; use Linux or macOS")
        self.max_ranks = max_ranks
        self._lock = threading.Lock()
        self._worlds: dict[tuple[int, str], RankWorld] = {}
        self._nursery: Nursery | None = Nursery()

    def run(
        self,
        fn: Callable[..., Result],
        *args: Any,
        ranks: int | None = None,
        timeout: float = 60.0,
        device: str = "cpu",
        **kwargs: Any,
    ) -> list[Result]:
        """Run `fn(*args, **kwargs)` on ranks 0 to `ranks - 1` (default: all) and return the results by rank.

        On each rank `torch.distributed` is a gloo world of exactly `ranks` ranks, torch runs one thread
        and is seeded with 0. Arguments and results are copies. Raises `RankError` with the rank and
        traceback of what failed first; a rank that is still running after `timeout` seconds counts as
        failed and is ended. Either way the next call gets fresh ranks.

        `device` "sim": the world is one of the made-up device (see `longmesh.testing.device`), whose backend refuses
        what NCCL refuses; "sim+cpu": it has gloo for CPU tensors besides, as after `init_process_group()` without a
        backend's name. "fake": one process in no world, for `fake_rank`.
        """
        num_ranks = self.max_ranks if ranks is None else ranks
        if num_ranks < 1:
            raise LongmeshError(f"run(ranks={num_ranks}): a run has at least 1 rank")
        if num_ranks > self.max_ranks:
            raise LongmeshError(
                f"run(ranks={num_ranks}): this pool has 1 to {self.max_ranks} ranks; "
                f"make it with RankPool({num_ranks})"
            )
        if device not in _DEVICES or (device == "fake" and num_ranks != 1):
            raise LongmeshError(
                f"run(device={device!r}, ranks={num_ranks}): there are the devices {', '.join(_DEVICES)}; 'fake' has "
                "1 process, which can be any rank"
            )
        if not timeout > 0:
            raise LongmeshError(f"run(timeout={timeout}): give a positive number of seconds")
        call = pack_call(fn, args, kwargs)
        with self._lock:
            if self._nursery is None:
                raise LongmeshError("run() on a closed RankPool: make a new one")
            key = num_ranks, device
            world = self._worlds.pop(key, None) or RankWorld(self._nursery, num_ranks, device)
            results = world.run(name_function(fn), call, read_surroundings(), timeout)
            self._worlds[key] = world
            return results

    def close(self) -> None:
        """End all ranks. Closing twice is fine."""
        with self._lock:
            for world in self._worlds.values():
                world.release()
            self._worlds.clear()
            if self._nursery is not None:
                self._nursery.close()
            self._nursery = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
