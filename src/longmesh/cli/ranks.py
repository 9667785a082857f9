"""The processes of one attempt of a run: started, looked at, ended.

They see what torchrun gives its ranks (RANK, WORLD_SIZE, MASTER_ADDR, ...), so a script that runs here runs under
torchrun on many hosts unchanged. The store that they meet at is ours and listens on loopback only, as gloo is told to:
neither asks for a password.

Pitfall: a rank that is told to end may not: it waits in a collective, or is stopped. After `GRACEFUL_S` comes SIGKILL.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from longmesh.cli import rank as rank_program
from longmesh.cli.idle import IdleRanks, WaitLimits, is_stopped
from longmesh.cli.output import RankOutput
from longmesh.cli.rank_exits import RankExit, read_crash
from longmesh.comm.stop import REQUEUE_EXIT_CODE
from longmesh.watch.thread import TIMED_OUT, FileBoard
from longmesh.watch.thread.status import RankStatus, catches

LOOPBACK = "127.0.0.1"
GRACEFUL_S = 1.0
LOOK_S = 0.02


class LocalRanks:
    """Ranks that run `command`. Made and used in one thread: Linux ends them when that thread ends."""

    def __init__(
        self,
        command: Sequence[str],
        num_ranks: int,
        *,
        output: RankOutput,
        directory: Path,
        environment: Mapping[str, str],
        limits: WaitLimits,
    ) -> None:
        self._directory, self._output = directory, output
        self._exits: list[RankExit] = []
        self.has_stopped = False  # a rank has left as it was asked to
        with socket.create_server((LOOPBACK, 0), backlog=num_ranks + 16) as listener:
            common = {**os.environ, **environment, **describe_world(num_ranks, listener.getsockname()[1])}
            self._running = {
                rank: subprocess.Popen(
                    [sys.executable, "-u", rank_program.__file__, self._settings(rank, limits), *command],
                    stdout=output.stdout_fds[rank],
                    stderr=output.stderr_fds[rank],
                    env=common | describe_rank(rank) | {"TORCHELASTIC_ERROR_FILE": str(self._record(rank))},
                )
                for rank in range(num_ranks)
            }
            board = FileBoard(str(directory))
            self._idle = IdleRanks(board, num_ranks, limits)
            for rank, process in self._running.items():
                # Until a rank speaks for itself: one that is stopped before has at least a process to be named by.
                started = RankStatus(rank, host=socket.gethostname(), pid=process.pid)
                board.claim(f"rank{rank}", started.to_json())
            self._store = dist.TCPStore(
                LOOPBACK,
                listener.getsockname()[1],
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=30),
                master_listen_fd=listener.detach(),
            )

    def look(self) -> list[RankExit]:
        """The ranks that have failed so far, in the order in which it was noticed."""
        found: list[RankExit] = []
        now = time.time_ns()
        for rank, process in list(self._running.items()):
            code = process.poll()
            if code is not None:
                del self._running[rank]
                self.has_stopped = self.has_stopped or code == REQUEUE_EXIT_CODE
                found += [self._read_exit(rank, code, now)] if code not in (0, REQUEUE_EXIT_CODE) else []
        # Of those noticed together, the kill came before what it caused.
        self._exits += sorted(found, key=lambda e: e.code != -signal.SIGKILL)
        return self._exits

    def look_for_idle(self) -> list[RankExit]:
        """The ranks that have failed so far, with one that is stopped or does not start."""
        pids = {rank: process.pid for rank, process in self._running.items()}
        finding = self._idle.look(pids)
        if finding is not None:
            exit_ = RankExit(
                finding.rank,
                TIMED_OUT,
                finding.headline,
                "\n".join(finding.lines),
                time.time_ns(),
                recorded=True,
                named=finding.rank,
            )
            self._exits.append(exit_)
        return self._exits

    @property
    def are_gone(self) -> bool:
        return not self._running

    @property
    def can_stop(self) -> bool:
        """Whether every rank listens to a request to stop (see comm/stop.py), where the system tells."""
        return all(catches(process.pid, signal.SIGUSR1) for process in self._running.values())

    def send(self, signum: int) -> None:
        for process in self._running.values():
            process.send_signal(signum)

    def end(self) -> list[RankExit]:
        """End those that still run, and wait until they are gone; all that failed, but for those that we ended."""
        self.look()
        asked = set(self._running)
        self.send(signal.SIGTERM)
        for process in self._running.values():
            if is_stopped(process.pid):
                process.kill()  # it would not see the other signal
        deadline = time.monotonic() + GRACEFUL_S
        while self._running and time.monotonic() < deadline:
            time.sleep(LOOK_S)
            self.look()
        self.send(signal.SIGKILL)
        for process in self._running.values():
            process.wait()
        self.look()
        return [e for e in self._exits if e.rank not in asked or e.recorded]

    def _settings(self, rank: int, limits: WaitLimits) -> str:
        """What rank.py is told beside the script."""
        files = {"board": str(self._directory), "crash_file": str(self._crash_file(rank))}
        return json.dumps({"launcher": os.getpid(), **files, **limits._asdict()})

    def _crash_file(self, rank: int) -> Path:
        return self._directory / f"crash{rank}"

    def _record(self, rank: int) -> Path:
        return self._directory / f"rank{rank}.json"

    def _read_exit(self, rank: int, code: int, now: int) -> RankExit:
        """What the rank wrote down; it may have been ended on its way out, so the exit code there counts."""
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            record: Any = json.loads(self._record(rank).read_text())["message"]
            extra = record["extraInfo"]
            return RankExit(
                rank,
                extra["exit_code"],
                record["message"],
                extra["py_callstack"],
                extra["time_ns"],
                recorded=True,
                named=extra["named"],
                is_usage_error=extra["is_usage_error"],
            )
        crash = read_crash(self._crash_file(rank), self._output.last_errors(rank))
        return RankExit(rank, code, crash.message, crash.stack, now, recorded=False)


def describe_world(num_ranks: int, port: int) -> dict[str, str]:
    """The variables that are the same on all ranks. Interfaces that are set already are kept."""
    world = {
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
        "ROLE_WORLD_SIZE": num_ranks,
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1,
        "ROLE_NAME": "default",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # else rank 0 makes a store, and it listens on every interface
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", 1),
    }
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if loopback is not None and name not in os.environ:
            world[name] = loopback
    return {name: str(value) for name, value in world.items()}


def describe_rank(rank: int) -> dict[str, str]:
    return {name: str(rank) for name in ("RANK", "LOCAL_RANK", "ROLE_RANK")}
