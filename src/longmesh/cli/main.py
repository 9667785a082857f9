"""The command line: parse, check, hand over to the command's own file.

Pitfall: everything after the script's name belongs to the script, options included, so our own options
come before it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from longmesh.cli.arguments import SCRIPT_ARGS, USAGE_ERROR, Launch, OneLineParser, add_launch_options, refuse
from longmesh.cli.doctor.command import add_parser as add_doctor_parser, run_doctor
from longmesh.cli.generate.command import add_parser as add_generate_parser, run_generate
from longmesh.cli.plan.command import add_parser as add_plan_parser, run_plan
from longmesh.cli.train import add_parser as add_train_parser, run_train

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code of the process."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return USAGE_ERROR
    try:
        commands = {
            "train": run_train,
            "generate": run_generate,
            "plan": run_plan,
            "doctor": run_doctor,
            "run": run_run,
        }
        return commands[options.command](options)
    except KeyboardInterrupt:
        return INTERRUPTED


def run_run(options: argparse.Namespace) -> int:
    """Run the command `run`; its exit code."""
    launch = Launch.of(options)
    problem = launch.find_problem() or find_problem(Path(options.script))
    if problem is not None:
        return refuse("longmesh run", problem)

    from longmesh.cli.run import run_script  # --help need not wait for the launcher

    if options.check:
        return run_script(
            str(Path(__file__).with_name("checked.py")), [options.script, *options.args], launch
        )
    return run_script(options.script, options.args, launch)


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
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
    add_launch_options(
        run,
        needs_ranks=True,
        timeout="name a rank that keeps others waiting in a collective for S seconds and end the run (default 900; it "
        "is named after 300)",
    )
    run.add_argument(
        "--check",
        action="store_true",
        help="compare every collective and message of longmesh across ranks before it runs, and stop where ranks "
        "diverge, as longmesh.watch.desync_check does; slow",
    )
    run.add_argument("script", help="a Python file")
    rest = run.add_argument(SCRIPT_ARGS, nargs=argparse.REMAINDER, help="arguments for the script")
    rest.required = False  # else a missing script is said to lack arguments, too
    add_train_parser(commands)
    add_generate_parser(commands)
    add_plan_parser(commands)
    add_doctor_parser(commands)
    return parser


def find_problem(script: Path) -> str | None:
    """Why there is no such script to run, in words; None if there is."""
    try:
        if script.is_dir():
            return f"{script} is a directory: give the Python file in it"
        if not script.exists():
            return f"no such script: {script} (looked in {Path.cwd()})"
        script.open("rb").close()
    except OSError as error:
        return f"{script} can't be read: {error.strerror}; give a Python file"
    return None
