"""`longmesh run`: a script on local ranks, their output on one terminal, who failed first, and starting again.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from longmesh.cli.arguments import Launch
from longmesh.cli.idle import WaitLimits
from longmesh.cli.output import RankOutput
from longmesh.cli.rank_exits import RankExit, describe_exits, find_first
from longmesh.cli.ranks import LOOK_S, LocalRanks
from longmesh.cli.restarts import Restarts
from longmesh.cli.signals import ReceivedSignal, receiving_signals
from longmesh.comm.stop import REQUEUE_EXIT_CODE
from longmesh.watch.thread import TIMED_OUT

PIPE_CLOSED = 128 + signal.SIGPIPE
# How long peers of a failed rank have to write down what became of them.
SETTLE_S = 0.3


@dataclass(frozen=True)
class Program:
    """What ranks run. `args` depend on their number and on whether they were started before.

    `mark` changes when a new checkpoint is there, where that is known.
    """

    script: str
    args: Callable[[int, bool], Sequence[str]]
    limits: WaitLimits
    command: str = "longmesh run"
    mark: Callable[[], object] | None = None

    def describe_limit(self, launch: Launch) -> str:
        """The limit that a rank has kept others waiting for, and where it comes from."""
        limit = launch.timeout or self.limits.stopped_after
        source = "" if launch.timeout else ", the default"
        return f"the limit is {limit:g} s (--timeout{source}): give a larger one if ranks may wait for longer"


def run_script(script: str, args: Sequence[str], launch: Launch, command: str = "longmesh run") -> int:
    """Run `script` on local ranks; the exit code of the first that failed, or 0."""
    return run_program(
        Program(script, lambda num_ranks, again: args, WaitLimits.of(launch.timeout), command), launch
    )


def run_program(program: Program, launch: Launch) -> int:
    """Run it until it ends, is stopped, or has failed too often; the exit code.

    For the main thread of a process of its own: it sets signal handlers.
    """
    restarts = Restarts(launch, program.mark)
    with receiving_signals() as told:
        while True:
            num_ranks = restarts.num_ranks
            ended = run_once(program, launch, told, num_ranks, restarts.done)
            if not ended.has_failed(told):
                return ended.say(program.command, told, resumes=program.mark is not None)
            report = describe_exits(ended.exits, num_ranks, program.command)
            first = find_first(ended.exits)
            if first.named is not None:
                report += f"; {program.describe_limit(launch)}"
            if first.is_usage_error or told.signum is not None:
                print(report, file=sys.stderr)
                return first.exit_code
            decision = restarts.decide(first.rank if first.named is None else first.named)
            words = f"\n{program.command}: {decision.why}" if decision.why else ""
            print(f"{report}{words}", file=sys.stderr, flush=True)
            if not decision.goes_on:
                return first.exit_code


@dataclass(frozen=True)
class Ended:
    """How an attempt ended: who failed, and whether ranks left with the code that asks to be queued again.

    `cut_off` is why the launcher ended ranks that still ran; None if they came to an end, or failed, by themselves.
    """

    exits: list[RankExit]
    has_stopped: bool
    cut_off: str | None
    reader_left: bool

    def has_failed(self, told: ReceivedSignal) -> bool:
        """Whether a rank failed by itself, and not by what ended the run."""
        if not self.exits or self.cut_off is not None:
            return False
        return told.signum is None or find_first(self.exits).exit_code != 128 + told.signum

    def say(self, command: str, told: ReceivedSignal, *, resumes: bool = False) -> int:
        """Say how a run ended that did not fail; its exit code. `resumes`: started again, it goes on where it was."""
        if self.reader_left:
            return PIPE_CLOSED
        if self.cut_off is None and not self.exits:
            if not self.has_stopped:
                return 0
            by = f" by {told.name}" if told.signum is not None else ""
            words = f"stopped{by} as asked; exit code {REQUEUE_EXIT_CODE}: start it again to go on"
            print(f"{command}: {words}", file=sys.stderr)
            return REQUEUE_EXIT_CODE
        if told.signum is None:
            print(
                f"{command}: a rank has stopped as asked, and others were ended{self.cut_off}",
                file=sys.stderr,
            )
            return TIMED_OUT
        if resumes and not self.cut_off and not told.at_once:  # ranks that start don't listen yet
            words = f"exit code {REQUEUE_EXIT_CODE}: start it again to go on"
            print(f"{command}: stopped by {told.name} while ranks started; {words}", file=sys.stderr)
            return REQUEUE_EXIT_CODE
        print(f"{command}: ended by {told.name}; so are the ranks{self.cut_off or ''}", file=sys.stderr)
        return 128 + told.signum


def run_once(program: Program, launch: Launch, told: ReceivedSignal, num_ranks: int, restarts: int) -> Ended:
    """One attempt."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="longmesh-run-")))
        output = stack.enter_context(RankOutput(num_ranks, sys.stdout.buffer, sys.stderr.buffer))
        environment = choose_environment(num_ranks, launch.threads) | {
            "TORCHELASTIC_RESTART_COUNT": str(restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(launch.max_restarts),
        }
        ranks = LocalRanks(
            [program.script, *program.args(num_ranks, restarts > 0)],
            num_ranks,
            output=output,
            directory=directory,
            environment=environment,
            limits=program.limits,
        )
        try:
            cut_off = wait_for_end(ranks, told, output, launch.grace)
        finally:
            exits = ranks.end()
    return Ended(exits, ranks.has_stopped, cut_off, output.reader_left)


def wait_for_end(ranks: LocalRanks, told: ReceivedSignal, output: RankOutput, grace: float) -> str | None:
    """Wait until all ranks are gone or one failed: None. Else why they are to be ended, where it is to be said."""
    deadline = None
    while not ranks.look() and not ranks.are_gone and not ranks.look_for_idle():
        if output.reader_left or told.at_once:
            return ""
        if deadline is None and told.signum is not None:
            if not ranks.can_stop:
                return ""
            ranks.send(signal.SIGUSR1)
        if deadline is None and (told.signum is not None or ranks.has_stopped):
            deadline = time.monotonic() + grace
        if deadline is not None and time.monotonic() > deadline:
            return f": they did not stop within {grace:g} s"
        time.sleep(LOOK_S)
    settled = time.monotonic() + SETTLE_S
    while not ranks.are_gone and time.monotonic() < settled:
        time.sleep(LOOK_S)
        ranks.look()
    return None


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
