"""watch: a rank that is stopped, loops or took another way is named, and the run ends instead of waiting for it.

Each rank has a thread that posts once a second where the rank is (see thread/). Under `longmesh run` and
`longmesh train` that thread is there already, posts in a directory of the launcher, and `watch` sets its limits;
elsewhere it is started here and posts in the world's key-value store.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from longmesh.comm import AxisGroup, CommEvent, CommObserver, observe_comm
from longmesh.comm.store import open_store, read_text
from longmesh.errors import LongmeshError, NotDistributedError
from longmesh.watch.thread import THREAD_NAME, TIMED_OUT, Finding, Watcher
from longmesh.watch.thread.status import RankStatus

_STORE_S = 3.0
_Question = Callable[[dist.Store], Any]


class Watch:
    """The limits of a watched program, which `watch` gives: `section` changes them for a while.

    >>> with watch(timeout=60) as watching:
    ...     with watching.section("first step", timeout=900):
    ...         pass
    """

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher

    @contextlib.contextmanager
    def section(self, name: str, *, timeout: float) -> Iterator[None]:
        """Inside, this rank may take `timeout` seconds, and those that wait for it are that patient.

        >>> with watch(timeout=60) as watching, watching.section("load", timeout=600):
        ...     data = list(range(3))
        """
        _check(f"section({name!r}, timeout={timeout})", timeout)
        with self._watcher.limited(timeout, timeout, name):
            yield


@contextlib.contextmanager
def watch(timeout: float = 300.0) -> Iterator[Watch]:
    """Name a rank that keeps another waiting in a collective for `timeout` seconds, and end the run.

    The report has the rank, its host and pid, whether it is stopped, its Python stack if it runs, its last collective,
    and what the others wait for. Then the process that has waited ends with exit code 124, and the launcher
    ends the others. Every rank of the world enters it. The clock runs only while a rank waits for others.

    >>> with watch(timeout=60) as watching:
    ...     total = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)]).sum().item()
    >>> total
    10.0
    """
    _check(f"watch(timeout={timeout})", timeout)
    running = next((t for t in threading.enumerate() if t.name == THREAD_NAME), None)
    with contextlib.ExitStack() as stack:
        if running is not None:
            watcher: Watcher = running  # pyright: ignore[reportAssignmentType]  # its class may be loaded by path
            stack.enter_context(watcher.limited(timeout, timeout))
        else:
            watcher = _start(timeout)
            stack.callback(watcher.stop)
        journal = _Journal()
        before, watcher.last = watcher.last, journal.describe
        stack.callback(setattr, watcher, "last", before)
        stack.enter_context(observe_comm(journal))
        yield Watch(watcher)


def _check(call: str, timeout: float) -> None:
    if not 0 < timeout < float("inf"):
        raise LongmeshError(f"{call}: give a positive number of seconds")


def _start(timeout: float) -> Watcher:
    if not dist.is_initialized():
        raise NotDistributedError(
            "watch() needs a process group: start this script with "
            "`longmesh run --ranks N script.py` or torchrun, and call it after init_process_group()"
        )
    watcher = Watcher(
        _StoreBoard(),
        dist.get_rank(),
        dist.get_world_size(),
        report_after=timeout,
        end_after=timeout,
        tell=_print,
        end=_leave,
    )
    watcher.start()
    return watcher


def _print(finding: Finding) -> None:
    print(finding.describe(), file=sys.stderr, flush=True)


def _leave(finding: Finding) -> None:
    _print(finding)
    os._exit(TIMED_OUT)


class _Journal(CommObserver):
    """The last collective of longmesh that this rank started."""

    def __init__(self) -> None:
        self._event: CommEvent | None = None

    def on_collective(self, event: CommEvent, group: AxisGroup) -> None:
        self._event = event

    def describe(self) -> str:
        event = self._event
        return "" if event is None else f"{event.kind} of {event.shape} {event.dtype} at {event.call_site}"


class _StoreBoard:
    """The world's key-value store, opened and asked by a thread: where its host is stopped, a call never returns."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[tuple[_Question, queue.SimpleQueue[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._answer, name="longmesh watch store", daemon=True).start()

    def write(self, name: str, text: str) -> None:
        self._ask(lambda store: store.set(_key(name), text))

    def read(self, name: str) -> str | None:
        return self._ask(lambda store: read_text(store, _key(name))) or None

    def claim(self, name: str, text: str) -> bool:
        return self._ask(lambda store: store.compare_set(_key(name), "", text)).decode() == text

    def remove(self, name: str) -> None:
        self.write(name, "")

    def _ask(self, question: _Question) -> Any:
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._asked.put((question, answers))
        try:
            answer = answers.get(timeout=_STORE_S)
        except queue.Empty:
            raise RuntimeError(f"no answer within {_STORE_S:g} s") from None
        if isinstance(answer, RuntimeError):
            raise answer
        return answer

    def _answer(self) -> None:
        store: dist.Store | None = None
        while True:
            question, answers = self._asked.get()
            try:
                store = store or open_store()
                answers.put(question(store))
            except RuntimeError as error:
                answers.put(error)

    def ask_for_stack(self, status: RankStatus) -> RankStatus:
        return replace(status, stack=[])  # its host may be another


def _key(name: str) -> str:
    return f"longmesh/watch/{name}"
