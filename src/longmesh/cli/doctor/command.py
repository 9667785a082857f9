"""The command `longmesh doctor`: alone, on local ranks that it starts, or as a rank of torchrun's."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from longmesh.cli.arguments import Launch, RankRange, refuse, whole_number


def add_parser(commands) -> None:
    """Add the command to the command line."""
    doctor = commands.add_parser(
        "doctor",
        help="check and measure this machine",
        description="Check and measure this machine: versions, settings that slow it down, attention kernels against "
        "float64, links between ranks, and every exchange. On several hosts: torchrun ... -m longmesh doctor. The exit "
        "code is 1 if anything is wrong.",
    )
    doctor.add_argument(
        "--ranks",
        type=whole_number,
        metavar="N",
        help="start N local ranks (default: as many as GPUs, else 2)",
    )
    doctor.add_argument(
        "--json", metavar="FILE", help="write all findings to FILE; attach it to a bug report"
    )
    doctor.add_argument(
        "--save",
        metavar="FILE",
        help="write the measurements as a Cluster, for --cluster and cluster=; its name ends in .json",
    )


def run_doctor(options: argparse.Namespace) -> int:
    """Run the command `doctor`; its exit code."""
    under_launcher = "RANK" in os.environ
    problem = find_problem(options, under_launcher)
    if problem is not None:
        return refuse("longmesh doctor", problem)
    from longmesh.cli.doctor import program  # --help need not wait for torch

    if under_launcher:
        return program.main(options.json or "", options.save or "")
    import torch

    from longmesh.cli.run import run_script

    ranks = options.ranks or max(2, torch.cuda.device_count())
    files = [str(Path(path).absolute()) if path else "" for path in (options.json, options.save)]
    return run_script(program.__file__, files, Launch(RankRange(ranks, ranks)), "longmesh doctor")


def find_problem(options: argparse.Namespace, under_launcher: bool) -> str | None:
    """What is wrong with the arguments, in words; None if nothing is."""
    if options.ranks is not None and under_launcher:
        return f"--ranks {options.ranks}: torchrun has started the ranks; leave it out"
    if options.ranks is not None:
        problem = Launch(RankRange(options.ranks, options.ranks)).find_problem()
        if problem is not None:
            return problem
    for name, path in (("--json", options.json), ("--save", options.save)):
        problem = None if path is None else find_file_problem(path)
        if problem is not None:
            return f"{name} {path or repr(path)}: {problem}"
    if options.save is not None and not options.save.endswith(".json"):
        return f"--save {options.save}: give a name that ends in .json, by which --cluster and cluster= know a file"
    alone = os.environ.get("WORLD_SIZE") == "1" if under_launcher else options.ranks == 1
    if options.save is not None and alone:
        return "--save needs 2 ranks at least: links are measured between ranks"
    return None


def find_file_problem(path: str) -> str | None:
    """Why a file can't be written there, in words; None if it can."""
    file = Path(path).absolute()
    try:
        if not path or file.is_dir():
            return "give the name of a file"
        if not file.parent.is_dir():
            return "its folder does not exist; make it first"
        is_new = not file.exists()
        file.open(
            "ab"
        ).close()  # permissions alone don't tell: a file system may be read-only, or take no files
        if is_new:
            file.unlink(missing_ok=True)
    except OSError as error:
        return f"it can't be written: {error.strerror}; give another name"
    return None
