"""The command `longmesh doctor`: alone, on local ranks that it starts, or as a rank of torchrun's."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from longmesh.cli.arguments import USAGE_ERROR, Launch, RankRange


def add_parser(commands) -> None:
    """Add the command to the command line."""
    doctor = commands.add_parser(
        "doctor",
        help="check and measure this machine",
        description="Check and measure this machine: versions, settings that hurt, attention kernels against float64, "
        "links between ranks, every exchange on them. On many hosts: torchrun ... -m longmesh doctor. Exit code 1 if "
        "anything is wrong.",
    )
    doctor.add_argument(
        "--ranks", type=int, metavar="N", help="start N local ranks (default: as many as GPUs, else 2)"
    )
    doctor.add_argument("--json", metavar="FILE", help="write every finding there; attach it to a report")
    doctor.add_argument("--save", metavar="FILE", help="write what was measured as a Cluster, for cluster=")


def run_doctor(options: argparse.Namespace) -> int:
    """Run the command `doctor`; its exit code."""
    under_launcher = "RANK" in os.environ
    if options.ranks is not None and (options.ranks < 1 or under_launcher):
        why = "the ranks are torchrun's here, leave it out" if under_launcher else "a run has at least 1 rank"
        print(f"longmesh doctor: --ranks {options.ranks}: {why}", file=sys.stderr)
        return USAGE_ERROR
    for name, path in (("--json", options.json), ("--save", options.save)):
        if path and not Path(path).absolute().parent.is_dir():
            print(
                f"longmesh doctor: {name} {path}: its folder does not exist; make it first", file=sys.stderr
            )
            return USAGE_ERROR
    from longmesh.cli.doctor import program  # --help need not wait for torch

    if options.save and options.ranks == 1:
        print(
            "longmesh doctor: --save needs 2 ranks at least: links are measured between ranks",
            file=sys.stderr,
        )
        return USAGE_ERROR
    if under_launcher:
        return program.main(options.json or "", options.save or "")
    import torch

    from longmesh.cli.run import run_script

    ranks = options.ranks or max(2, torch.cuda.device_count())
    files = [str(Path(path).absolute()) if path else "" for path in (options.json, options.save)]
    return run_script(program.__file__, files, Launch(RankRange(ranks, ranks)))
