"""`longmesh run`: local ranks through torch's elastic launcher, which is also torchrun's.

The ranks see what torchrun gives them (RANK, WORLD_SIZE, MASTER_ADDR, ...), so a script that runs here
runs under torchrun on many hosts unchanged. Ours are the output and the report.

Pitfall: when one rank fails, others fail because of it, and the launcher ends the rest; which came first
is not in the exit codes. Each rank writes down when it failed (see rank.py), and the earliest is reported.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from longmesh.cli import rank as rank_program
from longmesh.cli.output import RankOutput
from longmesh.cli.report import RankExit, describe_exits, find_first

PIPE_CLOSED = 128 + signal.SIGPIPE
SHUTDOWN_S = 10


def run_script(script: str, args: Sequence[str], *, num_ranks: int, num_threads: int | None) -> int:
    """Run `script` on `num_ranks` local ranks; the exit code of the first that failed, or 0.

    For a process of its own: it sets environment variables and signal handlers, which ranks inherit.
    """
    command = ["-u", rank_program.__file__, script, *args]
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="longmesh-run-"))
        output = stack.enter_context(RankOutput(num_ranks, sys.stdout.buffer, sys.stderr.buffer))
        stack.enter_context(_quiet_launcher())
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # a shell's background job ignores it
            signal.signal(signal.SIGINT, _interrupt_once)
        os.environ.update(_choose_environment(num_ranks, num_threads))
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            logs_specs=_PipedLogs(output, directory),
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            shutdown_timeout=SHUTDOWN_S,
            # SIGINT stays Python's: the launcher would pass it on, and a rank inside a collective ignores it.
            signals_to_handle="SIGTERM,SIGHUP,SIGQUIT",
        )
        try:
            # The launcher expands $ in arguments.
            elastic_launch(config, sys.executable)(*(part.replace("$", "$$") for part in command))
            return 0
        except ChildFailedError as error:
            exits = [_read_exit(rank, failure) for rank, failure in error.failures.items()]
        except KeyboardInterrupt:
            return _say_ended(signal.SIGINT)
        except SignalException as error:
            return PIPE_CLOSED if output.reader_left else _say_ended(error.sigval)
    print(describe_exits(exits, num_ranks), file=sys.stderr)
    return find_first(exits).exit_code


class _PipedLogs(LogsSpecs):
    """Tells the launcher to connect the ranks' streams to our pipes."""

    def __init__(self, output: RankOutput, directory: str) -> None:
        super().__init__()
        self._output = output
        self._directory = directory

    @property
    def root_log_dir(self) -> str:
        return self._directory

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        error_files = {rank: str(Path(self._directory) / f"rank{rank}.json") for rank in envs}
        for rank, env in envs.items():
            env["TORCHELASTIC_ERROR_FILE"] = error_files[rank]
        return LogsDest(
            stdouts=self._output.stdout_paths, stderrs=self._output.stderr_paths, error_files=error_files
        )


def _choose_environment(num_ranks: int, num_threads: int | None) -> dict[str, str]:
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


def _interrupt_once(signum: int, frame: FrameType | None) -> None:
    """Ctrl-C ends the ranks; a second one must not interrupt that and leave some behind."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


@contextlib.contextmanager
def _quiet_launcher() -> Iterator[None]:
    """The launcher logs each failure; the report says it better."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


def _read_exit(rank: int, failure: ProcessFailure) -> RankExit:
    """What the rank wrote down; it may have been ended on its way out, so its own exit code counts."""
    record: Any = failure.message
    if not isinstance(record, dict) or "time_ns" not in record["extraInfo"]:
        return RankExit(rank, failure.exitcode, "", "", failure.timestamp * 10**9, recorded=False)
    extra = record["extraInfo"]
    code, trace, time_ns = extra["exit_code"], extra["py_callstack"], extra["time_ns"]
    return RankExit(rank, code, record["message"], trace, time_ns, recorded=True)


def _say_ended(signum: int) -> int:
    print(f"longmesh run: ended by {signal.Signals(signum).name}; so are the ranks", file=sys.stderr)
    return 128 + signum
