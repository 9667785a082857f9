"""The process that forks ranks.

    your process ──socket── nursery ──fork── rank 0, rank 1, ...
         └────────────── a pipe to each ──────────────┘

It is forked when a pool is made and does nothing but fork, so ranks that are needed later (another world
size, a fresh set after a failure) come from a process that has run no threaded op, whatever the pool's
owner did meanwhile. It is also the ranks' parent: it ends them by their pid and collects their status, and
when its owner is gone its socket closes and it takes all ranks with it.

Pitfall: one request at a time; the answer is awaited before the next one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import signal
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch

from longmesh.testing.worker import Seat, serve_rank

_MAX_MESSAGE = 4096


class Nursery:
    """The owner's side."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            self._socket.close()
            _live(lambda: _serve_owner(theirs))
        theirs.close()

    def fork(self, seat: Seat, pipe_fd: int, stack_fd: int, listen_fd: int) -> int:
        """The pid of a new rank that uses these descriptors."""
        request = dataclasses.asdict(seat)
        return self._ask(request, [pipe_fd, stack_fd, listen_fd])["pid"]

    def end(self, pid: int) -> int:
        """End a rank if it still runs; its exit code, or minus the signal that ended it."""
        return self._ask({"end": pid}, [])["code"]

    def close(self) -> None:
        """End all ranks, then the nursery. Nothing else may be called afterwards."""
        with contextlib.suppress(OSError):  # the nursery is gone
            self._socket.shutdown(
                socket.SHUT_RDWR
            )  # closing is not enough: nurseries forked later have copies of it
        self._socket.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)

    def _ask(self, request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        answer = b""
        with contextlib.suppress(OSError):
            socket.send_fds(self._socket, [json.dumps(request).encode()], fds)
            answer = self._socket.recv(_MAX_MESSAGE)
        if not answer:
            raise RuntimeError("the process that forks this pool's ranks is gone: make a new RankPool")
        return json.loads(answer)


def _live(life: Callable[[], None]) -> None:
    """Run a forked process's whole life; never returns into the code that was forked."""
    code = 1
    try:
        life()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _serve_owner(owner: socket.socket) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)  # a forked process with more OpenMP threads hangs
    gc.freeze()  # keep the memory that all ranks share untouched
    pids: list[int] = []
    while True:
        data, fds, _, _ = socket.recv_fds(owner, _MAX_MESSAGE, 3)
        if not data:
            break
        request = json.loads(data)
        if "end" in request:
            pids.remove(request["end"])
            answer = {"code": _end_process(request["end"])}
        else:
            answer = {"pid": _fork_rank(owner, Seat(**request), fds)}
            pids.append(answer["pid"])
        owner.sendall(json.dumps(answer).encode())
    for pid in pids:
        _end_process(pid)


def _fork_rank(owner: socket.socket, seat: Seat, fds: list[int]) -> int:
    nursery = os.getpid()
    pid = os.fork()
    if pid == 0:
        owner.close()
        _live(lambda: serve_rank(seat, nursery, *fds))
    for fd in fds:
        os.close(fd)
    return pid


def _end_process(pid: int) -> int:
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)
