"""The ranks of one world size: start them, run calls on all of them, find out who failed.

A world is used until its first failure and then ended as a whole: after an exception, messages may be
left in its sockets and groups half made, and no later run may meet them.

Pitfall: when a rank fails, its peers may wait for it for ever. They get `SETTLE_S` to report what they
have, then the failed ranks are ended, which breaks the connections the others wait on, then they get
`GRACE_S` more.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import tempfile
import time
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import IO, Any

from longmesh.testing.failure import AFTER_ALL_OTHERS, BEFORE_ALL_OTHERS, RankError, RankFailure
from longmesh.testing.nursery import Nursery
from longmesh.testing.shipping import Surroundings
from longmesh.testing.worker import STACK_SIGNAL, Seat, run_call

START_S = 120.0
SETTLE_S = 0.2
GRACE_S = 2.0
_WAITING_FRAMES = 3


@dataclass(frozen=True)
class _Rank:
    rank: int
    pid: int
    pipe: Connection
    stacks: IO[bytes]


class RankWorld:
    """`num_ranks` processes in one world of a device."""

    def __init__(self, nursery: Nursery, num_ranks: int, device: str = "cpu") -> None:
        self._nursery = nursery
        self._surroundings: Surroundings | None = None
        self._ended: dict[int, int] = {}
        self._ranks = _fork_ranks(nursery, num_ranks, device)
        try:
            self._collect("the start of the ranks", START_S)
        except BaseException:
            self.end()
            raise

    def run(self, function: str, call: bytes, surroundings: Surroundings, timeout: float) -> list[Any]:
        """The results by rank. After any exception the world is ended and must not be used again."""
        news = b"" if surroundings == self._surroundings else pickle.dumps(surroundings)
        self._surroundings = surroundings
        try:
            for r in self._ranks:
                with contextlib.suppress(OSError):  # a rank that is gone shows when its answer is read
                    r.pipe.send_bytes(news)
                    r.pipe.send_bytes(call)
            return self._collect(function, timeout)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """End the ranks, busy or not, and wait until they are gone."""
        ranks = self.release()
        for r in ranks:
            self._end_rank(r)

    def release(self) -> list[_Rank]:
        """Close our side of the pipes: idle ranks leave, and busy ones end with the nursery."""
        ranks, self._ranks = self._ranks, []
        for r in ranks:
            r.pipe.close()
            r.stacks.close()
        return ranks

    def _end_rank(self, r: _Rank) -> int:
        if r.rank not in self._ended:
            self._ended[r.rank] = self._nursery.end(r.pid)
        return self._ended[r.rank]

    def _collect(self, function: str, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, RankFailure] = {}
        pending = {r.pipe: r for r in self._ranks}
        self._read_until(time.monotonic() + timeout, pending, results, failures, stop_at_failure=True)
        if failures:
            self._read_until(time.monotonic() + SETTLE_S, pending, results, failures)
            for rank in failures:
                self._end_rank(self._ranks[rank])
            self._read_until(time.monotonic() + GRACE_S, pending, results, failures)
            summary = "had not finished when the run was ended"
            for r in pending.values():
                failures[r.rank] = RankFailure(r.rank, "ended", summary, "", AFTER_ALL_OTHERS)
        elif pending:
            failures = _describe_hang(list(pending.values()), timeout)
        if failures:
            raise RankError(function, len(self._ranks), failures)
        return [results[r.rank] for r in self._ranks]

    def _read_until(
        self,
        deadline: float,
        pending: dict[Connection, _Rank],
        results: dict[int, Any],
        failures: dict[int, RankFailure],
        *,
        stop_at_failure: bool = False,
    ) -> None:
        """Move ranks from `pending` to `results` or `failures` as their reports come in."""
        while pending and not (stop_at_failure and failures):
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                return
            for pipe in ready:
                assert isinstance(pipe, Connection)
                r = pending.pop(pipe)
                try:
                    ok, value = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    ok, value = False, _describe_death(r.rank, self._end_rank(r))
                if ok:
                    results[r.rank] = value
                else:
                    failures[r.rank] = value


def _fork_ranks(nursery: Nursery, num_ranks: int, device: str) -> list[_Rank]:
    ranks: list[_Rank] = []
    with contextlib.ExitStack() as on_failure, socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        for rank in range(num_ranks):
            ours, theirs = Pipe()
            on_failure.enter_context(ours)
            stacks = on_failure.enter_context(tempfile.TemporaryFile())
            with theirs:
                seat = Seat(rank, num_ranks, port, device)
                pid = nursery.fork(seat, theirs.fileno(), stacks.fileno(), listener.fileno())
            ranks.append(_Rank(rank, pid, ours, stacks))
        on_failure.pop_all()
    return ranks


def _describe_death(rank: int, code: int) -> RankFailure:
    if code < 0:
        summary = f"was killed by {signal.Signals(-code).name}"
    else:
        summary = f"ended its process with exit code {code}"
    return RankFailure(rank, "died", summary, "", BEFORE_ALL_OTHERS)


def _describe_hang(pending: list[_Rank], timeout: float) -> dict[int, RankFailure]:
    """Name the ranks that are stuck: those outside a collective, or all if every one waits in one."""
    for r in pending:
        os.kill(r.pid, STACK_SIGNAL)
    stacks = {r.rank: _read_stack(r.stacks) for r in pending}
    waiting = {rank: _waits_for_peers(stack) for rank, stack in stacks.items()}
    failures: dict[int, RankFailure] = {}
    for rank, stack in stacks.items():
        summary = f"did not finish within {timeout:g} s and was ended"
        when = BEFORE_ALL_OTHERS
        if waiting[rank] and not all(waiting.values()):
            summary, when = "was waiting for it in a collective", AFTER_ALL_OTHERS
        failures[rank] = RankFailure(rank, "hung", summary, stack, when)
    return failures


def _read_stack(stacks: IO[bytes]) -> str:
    """The rank's frames, innermost first, down to where the pool called the function."""
    text, deadline = b"", time.monotonic() + 1.0
    while time.monotonic() < deadline:
        time.sleep(0.02)
        now = os.pread(stacks.fileno(), 1 << 20, 0)
        if now and now == text:
            break
        text = now
    lines = text.decode(errors="replace").splitlines()
    ours = [i for i, line in enumerate(lines) if line.endswith(f" in {run_call.__name__}")]
    return "\n".join(lines[: ours[-1]] if ours else lines) or "(no stack: the process did not answer)"


def _waits_for_peers(stack: str) -> bool:
    frames = [line for line in stack.splitlines() if line.lstrip().startswith("File ")]
    rooms = ("/torch/distributed/", "/longmesh/comm/")
    return any(room in frame for frame in frames[:_WAITING_FRAMES] for room in rooms)
