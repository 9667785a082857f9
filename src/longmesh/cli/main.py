"""The command line: parse, check, hand over to the command's own file.

Pitfall: everything after the script's name belongs to the script, options included, so our own options
come before it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from longmesh.cli.train import add_parser as add_train_parser, run_train

USAGE_ERROR = 2
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code of the process."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return USAGE_ERROR
    try:
        return run_train(options) if options.command == "train" else run_run(options)
    except KeyboardInterrupt:
        return INTERRUPTED


def run_run(options: argparse.Namespace) -> int:
    """Run the command `run`; its exit code."""
    problem = find_problem(options)
    if problem is not None:
        print(f"longmesh run: {problem}", file=sys.stderr)
        return USAGE_ERROR

    from longmesh.cli.run import choose_limits, run_script  # --help need not wait for the launcher

    return run_script(
        options.script,
        options.args,
        num_ranks=options.ranks,
        num_threads=options.threads,
        limits=choose_limits(options.timeout),
    )


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="longmesh", description="Distributed tensors and exact long-context attention for PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"longmesh {version('longmesh')}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    run = commands.add_parser(
        "run",
        help="run a script on several local ranks",
        description="Run a script on several local ranks, as torchrun would. Lines are prefixed by rank; the "
        "first rank that fails ends the others, and its traceback and exit code are the command's.",
    )
    run.add_argument("--ranks", type=int, required=True, metavar="N", help="how many processes to start")
    run.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="threads per rank (default: OMP_NUM_THREADS if set, else the cores divided by the ranks)",
    )
    run.add_argument(
        "--timeout",
        type=float,
        metavar="S",
        help="seconds that a rank may keep others waiting in a collective before the run ends (default: it is "
        "named after 300 and the run goes on)",
    )
    run.add_argument("script", help="a Python file")
    run.add_argument("args", nargs=argparse.REMAINDER, help="what the script gets as its arguments")
    add_train_parser(commands)
    return parser


def find_problem(options: argparse.Namespace) -> str | None:
    """What is wrong with the arguments of `run`, in words; None if nothing is."""
    if options.ranks < 1:
        return f"--ranks {options.ranks}: a run has at least 1 rank"
    if options.threads is not None and options.threads < 1:
        return f"--threads {options.threads}: a rank has at least 1 thread; leave it out to share the cores"
    if options.timeout is not None and not 0 < options.timeout < float("inf"):
        return f"--timeout {options.timeout:g}: give a positive number of seconds, or leave it out to wait for ever"
    script = Path(options.script)
    if script.is_dir():
        return f"{script} is a directory: give the Python file in it"
    if not script.exists():
        return f"no such script: {script} (looked in {Path.cwd()})"
    return None
