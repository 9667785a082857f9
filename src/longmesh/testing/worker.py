"""One rank: a forked process that joins its world once and then runs calls until its pipe closes.

    pool  --call-->  rank        b"..." the surroundings (or empty), then the call
    pool  <-report-  rank        (True, result) or (False, RankFailure), pickled by the rank

Pitfall: a failed rank must not leave at once. Its sockets would close under peers that are still reading
what it sent; it waits for the pool, which ends it after the peers had time to report.
"""

from __future__ import annotations

import contextvars
import ctypes
import faulthandler
import os
import pickle
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from longmesh.comm.agree import check_every_call
from longmesh.testing.failure import RankFailure
from longmesh.testing.shipping import CopyPickler, apply_surroundings, unpack_call

STACK_SIGNAL = signal.SIGUSR1
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


@dataclass(frozen=True)
class Seat:
    """Which rank of which world a process is, and where its world meets."""

    rank: int
    num_ranks: int
    port: int
    device: str = "cpu"


def serve_rank(seat: Seat, parent: int, pipe_fd: int, stack_fd: int, listen_fd: int) -> None:
    """The life of a rank. Every rank of the world enters it once; returns when the pool closes the pipe."""
    _settle_process(f"lm-rank{seat.rank}of{seat.num_ranks}", stack_fd)
    if os.getppid() != parent:
        return  # it was killed before it could take us with it
    pipe = Connection(pipe_fd)
    try:
        if seat.device != "fake":  # there, each call makes a world of its own
            _join_world(seat, listen_fd)
        _send_report(pipe, seat.rank, True, None)
        while True:
            surroundings = pipe.recv_bytes()
            call = pipe.recv_bytes()
            if surroundings:
                apply_surroundings(pickle.loads(surroundings))
            if not run_call(pipe, seat.rank, call):
                pipe.recv_bytes()  # until the pool ends us
    except (EOFError, OSError):
        return


def _settle_process(name: str, stack_fd: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the pool's owner, who ends us
    faulthandler.register(STACK_SIGNAL, file=stack_fd, all_threads=True)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
    # The owner's streams may be objects that only collect; the descriptors are where output belongs.
    sys.stdin = open(os.devnull)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115


def _join_world(seat: Seat, listen_fd: int) -> None:
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback  # else gloo resolves the host's name
    store = dist.TCPStore(
        "127.0.0.1",
        seat.port,
        seat.num_ranks,
        is_master=seat.rank == 0,
        wait_for_workers=False,
        master_listen_fd=listen_fd if seat.rank == 0 else None,
    )
    dist.init_process_group(_backend(seat.device), store=store, rank=seat.rank, world_size=seat.num_ranks)


def _backend(device: str) -> str:
    if device == "cpu":
        return "gloo"
    from longmesh.testing.device.group import BACKEND, register_backend
    from longmesh.testing.device.register import register_device

    register_device()
    register_backend()
    return BACKEND if device == "sim" else f"cpu:gloo,sim:{BACKEND}"


def run_call(pipe: Connection, rank: int, data: bytes) -> bool:
    """Run one call and report; whether it succeeded. The frame where a rank's stack dump is cut."""
    try:
        fn, args, kwargs = unpack_call(data)
        random.seed(0)
        torch.default_generator.manual_seed(0)  # torch.manual_seed visits every device type: 280 µs
        context = contextvars.copy_context()  # what a call sets is gone with it
        result = context.run(_checked, fn, args, kwargs)
    except BaseException as error:
        return _send_report(pipe, rank, False, _describe_exception(rank, error))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return _send_report(pipe, rank, True, result)


def _checked(fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    with check_every_call():  # a test may call one rank differently whenever it likes
        return fn(*args, **kwargs)


def _describe_exception(rank: int, error: BaseException) -> RankFailure:
    now = time.monotonic_ns()
    own = error.__traceback__
    while own is not None and own.tb_frame.f_code.co_filename == __file__:  # ours, not the caller's
        own = own.tb_next
    text = "".join(traceback.format_exception(type(error), error, own))
    line = traceback.format_exception_only(type(error), error)[-1].strip().splitlines()[0]
    return RankFailure(rank, "raised", f"raised {line}", text, now)


def _send_report(pipe: Connection, rank: int, ok: bool, value: Any) -> bool:
    try:
        data = CopyPickler().to_bytes((ok, value))
    except Exception as error:
        summary = (
            f"returned a {type(value).__qualname__} that cannot be sent back: {error}; return plain values"
        )
        failure = RankFailure(rank, "raised", summary, "", time.monotonic_ns())
        ok, data = False, pickle.dumps((False, failure))
    pipe.send_bytes(data)
    return ok
