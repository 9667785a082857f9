"""`longmesh train`: the reference trainer on local ranks, or on the ranks that torchrun has started.

    longmesh train --ranks 2 ...            starts 2 ranks, each of which runs the program `longmesh.train`
    torchrun ... -m longmesh train ...      is such a rank already: runs the program in this process

The program gets its options as JSON: those that were given, so that defaults are the trainer's own.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from longmesh.cli.arguments import (
    Launch,
    RankRange,
    add_launch_options,
    number,
    refuse,
    token_count,
    whole_number,
)

PROGRAM = "longmesh.train"
DEFAULT_TIMEOUT, START_TIMEOUTS = 300.0, 3  # the trainer's own limit takes over when it has started
DEFAULT_OUT = "longmesh-train"
LEAST_HALVED = 8  # steps
AXES = ("data", "context", "tensor")
LAUNCH = ("command", "ranks", "threads", "grace", "max_restarts", "compare")


def add_parser(commands: Any) -> None:
    """Add `train` to the commands of a parser."""
    parser = commands.add_parser(
        "train",
        argument_default=argparse.SUPPRESS,
        help="train a small transformer on a long sequence that is cut over ranks",
        description="Train a byte-level transformer on the sources of Python's standard library, packed into "
        "long sequences, on a mesh of data x context x tensor. Writes checkpoints and a page with the loss curve, the "
        "balance of the ranks and the attention plan. Under torchrun it uses torchrun's ranks.",
    )
    add_launch_options(
        parser,
        needs_ranks=False,
        timeout="name a rank that keeps others waiting for S seconds and end the run; three times as long in the first "
        "step, a save or a load (default 300)",
    )
    sizes = [
        ("data", "groups of ranks, each with its own sequences (default 1)"),
        ("context", "ranks that each sequence is cut over (default: the ranks divided by data x tensor)"),
        ("tensor", "ranks that heads and features are sharded over (default 1)"),
        ("batch", "sequences per step, over all ranks (default 1)"),
        ("steps", "steps in all, including those before a resume (default 20)"),
        ("dim", "features per token (default 128)"),
        ("layers", "transformer blocks (default 2)"),
        ("heads", "query heads (default 4)"),
        ("kv-heads", "key heads (default 2)"),
        ("seed", "seed of the weights and of the order of documents (default 0)"),
        ("save-every", "steps between checkpoints (default: one checkpoint, at the end)"),
        ("keep", "newest checkpoints to keep (default 3)"),
        ("keep-every", "also keep checkpoints whose step is a multiple of N (default: none)"),
        (
            "check-replicas",
            "compare the ranks' copies of the parameters every N steps (default: never)",
        ),
    ]
    for name, text in sizes:
        parser.add_argument(f"--{name}", type=whole_number, metavar="N", help=text)
    parser.add_argument(
        "--seq-len",
        type=token_count,
        metavar="N",
        help="tokens per sequence, such as 16384, 64K, 1M or 1e6 (default 16384)",
    )
    parser.add_argument(
        "--learning-rate", type=number, metavar="X", help="AdamW's learning rate (default 0.003)"
    )
    parser.add_argument("--mask", metavar="NAME", help="documents (default) or causal")
    parser.add_argument(
        "--exchange",
        metavar="NAME",
        help="how keys are sent: auto (default), ring, allgather, ulysses, sparse, cheapest or hybrid",
    )
    parser.add_argument(
        "--cluster",
        metavar="NAME",
        help="the machine to plan for: a file of longmesh doctor --save, or cpu, a100 or h100 (default: the device's)",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="directory for checkpoints, figures and the page (default longmesh-train)",
    )
    parser.add_argument(
        "--resume",
        metavar="DIR",
        help="resume from another run's --out, on any mesh; auto: from this --out, if it has a checkpoint",
    )
    parser.add_argument("--baseline", metavar="DIR", help="compare with another run's --out")
    parser.add_argument(
        "--force",
        action="store_true",
        help="use --out even if another run has left checkpoints there, which are replaced, or seems to use it still",
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="run the same training in one process, too, in turn, and compare",
    )


def run_train(options: argparse.Namespace) -> int:
    """Run the command; its exit code."""
    told = {name: value for name, value in vars(options).items() if name not in LAUNCH}
    world_size = _torchrun_world_size()
    launch = Launch.of(options)
    if world_size is not None and "ranks" not in options:
        launch = launch._replace(ranks=RankRange(world_size, world_size))
    compare = getattr(options, "compare", False)
    ranks = launch.ranks.most
    told.setdefault("context", max(1, ranks // (told.get("data", 1) * told.get("tensor", 1) or 1)))
    problem = (
        launch.find_problem()
        or find_problem(told, ranks, compare, world_size)
        or _find_trainers_problem(told)
        or (_find_trainers_problem(_alone(told)) if compare else None)
    )
    if problem is not None:
        return refuse("longmesh train", problem)
    if world_size is not None:
        return _run_here(told)
    return _compare(told, launch) if compare else _start(told, launch)


def _alone(told: dict[str, Any]) -> dict[str, Any]:
    """The same training in one process, in a directory of its own; resumed if that directory is to be."""
    dropped = ("baseline",) if told.get("resume") == "auto" else ("baseline", "resume")
    alone = {name: value for name, value in told.items() if name not in dropped}
    out = Path(told.get("out", DEFAULT_OUT), "one-process")
    return alone | {"data": 1, "context": 1, "tensor": 1, "out": str(out)}


def _compare(told: dict[str, Any], launch: Launch) -> int:
    """Train on the ranks and in one process, in turn: what slows the machine down for a while meets both.

    The ranks run the first half of the steps, then comes the one process, then the ranks' second half.
    """
    options = import_module(f"{PROGRAM}.options")
    steps, source = told.get("steps", options.TrainOptions.steps), told.get("resume")
    source = told.get("out", DEFAULT_OUT) if source == "auto" else source
    first = 0 if source is None else max(options.checkpoint_steps(Path(source)), default=0)
    alone = _alone(told)
    if steps - first >= LEAST_HALVED:
        code = _start(told | {"until": (first + steps) // 2}, launch)
        if code != 0:
            return code
        told = told | {"resume": "auto"}
    threads = launch.threads and launch.threads * launch.ranks.most
    code = _start(alone, launch._replace(ranks=RankRange(1, 1), threads=threads))
    return code or _start(told | {"baseline": alone["out"]}, launch)


def find_problem(told: dict[str, Any], ranks: int, compare: bool, world_size: int | None) -> str | None:
    """What is wrong with the arguments that say where to run, in words; None if nothing is."""
    if world_size is not None and ranks != world_size:
        return f"--ranks {ranks}: torchrun has started {world_size}; leave it out, or start as many"
    if world_size is not None and compare:
        return (
            "--compare starts a process of its own, which torchrun's ranks can't; run `longmesh train --ranks 1 --out "
            "ONE` with the same options first, then give --baseline ONE here"
        )
    data, context, tensor = (told.get(name, 1) for name in AXES)
    if min(data, context, tensor) >= 1 and data * context * tensor != ranks:
        return (
            f"--data {data} x --context {context} x --tensor {tensor} make {data * context * tensor} ranks, and "
            f"{ranks} run; the product must be the number of ranks"
        )
    return None


def _find_trainers_problem(told: dict[str, Any]) -> str | None:
    """What the trainer itself would say of its options: asked by name, since commands don't import it."""
    try:
        options = import_module(f"{PROGRAM}.options").TrainOptions(**told)
        options.check_size()
        options.check_paths()
    except ValueError as error:
        return str(error)
    return None


def fit_mesh(ranks: int, told: dict[str, Any]) -> dict[str, int]:
    """The mesh for another number of ranks: tensor and data as large as they can stay, context takes the rest."""
    for tensor in _divisors(told.get("tensor", 1)):
        for data in _divisors(told.get("data", 1)):
            if ranks % (data * tensor) == 0:
                return {"data": data, "context": ranks // (data * tensor), "tensor": tensor}
    raise AssertionError("1 divides every number of ranks")


def _divisors(number: int) -> list[int]:
    return [n for n in range(number, 0, -1) if number % n == 0]


def _torchrun_world_size() -> int | None:
    """How many ranks torchrun has started, if this is one of them."""
    return (
        int(os.environ["WORLD_SIZE"]) if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys() else None
    )


def _run_here(told: dict[str, Any]) -> int:
    """Be one of torchrun's ranks."""
    sys.argv = [PROGRAM, json.dumps(told)]
    try:
        runpy.run_module(PROGRAM, run_name="__main__")
    except SystemExit as leaving:
        if isinstance(leaving.code, str):
            return refuse("longmesh train", leaving.code)
        raise
    return 0


def _start(told: dict[str, Any], launch: Launch) -> int:
    """Run the program on local ranks; rank 0 may draw on the terminal that its pipe hides from it."""
    from longmesh.cli.idle import WaitLimits  # --help need not wait for the launcher
    from longmesh.cli.run import Program, run_program

    spec = find_spec(PROGRAM)
    assert spec is not None and spec.origin is not None
    is_terminal = sys.stdout.isatty()
    if is_terminal:
        told = told | {"terminal": os.ttyname(sys.stdout.fileno())}
    out = Path(told.get("out", DEFAULT_OUT))
    at_first = mark_of(out)

    def args(num_ranks: int, again: bool) -> list[str]:
        """The options as they were given; after a restart from what this run has saved, on the mesh that fits."""
        goes_on = {"resume": "auto"} if again and mark_of(out) != at_first else {}
        mesh = fit_mesh(num_ranks, told) if num_ranks != launch.ranks.most else {}
        return [json.dumps(told | goes_on | mesh)]

    limit_s = told.get("timeout", DEFAULT_TIMEOUT)
    start_s = START_TIMEOUTS * limit_s
    program = Program(
        str(Path(spec.origin).with_name("__main__.py")),
        args,
        WaitLimits(start_s, start_s, limit_s),
        command="longmesh train",
        mark=lambda: mark_of(out),
    )
    code = run_program(program, launch)
    if is_terminal:
        print("\x1b[?25h", end="", flush=True)  # a bar that was ended leaves the cursor hidden
    return code


def mark_of(out: Path) -> object:
    """Another value for every checkpoint that is whole there; None if there is none.

    Its name, too: a clock's tick may be longer than the time between two of them.
    """
    found: list[tuple[int, str]] = []
    for path in out.glob("checkpoint/step-*/.metadata"):
        with suppress(OSError):  # another run may just remove it
            found.append((path.stat().st_mtime_ns, path.parent.name))
    return max(found, default=None)
