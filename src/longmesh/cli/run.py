"""`longmesh run`: a script on local ranks, their output on one terminal, and who failed first.

Pitfall: when one rank fails, others fail because of it, and the launcher ends the rest; which came first
is not in the exit codes. Each rank writes down when it failed (see rank.py), and the earliest is reported.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from longmesh.cli.output import RankOutput
from longmesh.cli.ranks import LOOK_S, LocalRanks, WaitLimits
from longmesh.cli.report import describe_exits, find_first
from longmesh.cli.told import Told, told_by_signals

PIPE_CLOSED = 128 + signal.SIGPIPE
# How long peers of a failed rank have to write down what became of them.
SETTLE_S = 0.3
DEFAULT_LIMITS = WaitLimits()


def run_script(
    script: str,
    args: Sequence[str],
    *,
    num_ranks: int,
    num_threads: int | None,
    limits: WaitLimits = DEFAULT_LIMITS,
    command: str = "longmesh run",
) -> int:
    """Run `script` on `num_ranks` local ranks; the exit code of the first that failed, or 0.

    For the main thread of a process of its own: it sets signal handlers.
    """
    with contextlib.ExitStack() as stack:
        told = stack.enter_context(told_by_signals())
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="longmesh-run-")))
        output = stack.enter_context(RankOutput(num_ranks, sys.stdout.buffer, sys.stderr.buffer))
        environment = choose_environment(num_ranks, num_threads)
        ranks = LocalRanks(
            [script, *args],
            num_ranks,
            output=output,
            directory=directory,
            environment=environment,
            limits=limits,
        )
        try:
            wait_for_end(ranks, told, output)
        finally:
            exits = ranks.end()
    if output.reader_left:
        return PIPE_CLOSED
    if told.signum is not None:
        print(f"{command}: ended by {told.name}; so are the ranks", file=sys.stderr)
        return 128 + told.signum
    if not exits:
        return 0
    print(describe_exits(exits, num_ranks, command), file=sys.stderr)
    return find_first(exits).exit_code


def choose_limits(timeout: float | None) -> WaitLimits:
    """Ranks that keep others waiting are named in any case; the run ends only at a timeout that was given."""
    return WaitLimits(min(DEFAULT_LIMITS.report_after, timeout or DEFAULT_LIMITS.report_after), timeout)


def wait_for_end(ranks: LocalRanks, told: Told, output: RankOutput) -> None:
    """Return when there is nothing more to wait for: all ranks are gone, one failed, or we are told to end."""
    while not ranks.look() and not ranks.are_gone:
        if told.signum is not None or output.reader_left:
            return
        time.sleep(LOOK_S)
    settled = time.monotonic() + SETTLE_S
    while not ranks.are_gone and time.monotonic() < settled:
        time.sleep(LOOK_S)
        ranks.look()


def choose_environment(num_ranks: int, num_threads: int | None) -> dict[str, str]:
    """Standard variables for the ranks: threads, and the terminal that they can't see behind the pipes."""
    environment: dict[str, str] = {}
    if num_threads is not None or "OMP_NUM_THREADS" not in os.environ:
        environment["OMP_NUM_THREADS"] = str(num_threads or max(1, _count_cores() // num_ranks))
    if sys.stdout.isatty():
        prefix = len(f"[rank {num_ranks - 1}] ")
        environment["COLUMNS"] = str(max(20, os.get_terminal_size(sys.stdout.fileno()).columns - prefix))
        environment["FORCE_COLOR"] = "1"
    return environment


def _count_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
