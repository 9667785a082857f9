"""`longmesh train`: the reference trainer on local ranks, or on the ranks that torchrun has started.

    longmesh train --ranks 2 ...            starts 2 ranks, each of which runs the program `longmesh.train`
    torchrun ... -m longmesh train ...      is such a rank already: runs the program in this process

The program gets its options as JSON: those that were given, so that defaults are the trainer's own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import runpy
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PROGRAM = "longmesh.train"
DEFAULT_TIMEOUT, START_TIMEOUTS = 300.0, 3  # the trainer's own limit takes over when it has started
LAUNCH = ("command", "ranks", "threads", "compare")


def add_parser(commands: Any) -> None:
    """Add `train` to the commands of a parser."""
    parser = commands.add_parser(
        "train",
        argument_default=argparse.SUPPRESS,
        help="train a small transformer on a long sequence that is cut over ranks",
        description="Train a byte-level transformer on the sources of Python's standard library, packed to long "
        "sequences, on a mesh of data x context x tensor. Leaves a checkpoint and a page with the loss curve, the "
        "balance of the ranks and the plan of attention. Under torchrun the ranks are torchrun's.",
    )
    sizes = [
        ("ranks", "processes to start (not under torchrun; default 1)"),
        (
            "threads",
            "threads per rank (default: OMP_NUM_THREADS if set, else the cores divided by the ranks)",
        ),
        ("data", "groups of ranks that get different sequences (default 1)"),
        ("context", "ranks that a sequence is cut over (default: those that data and tensor leave)"),
        ("tensor", "ranks that heads and features are cut over (default 1)"),
        ("seq-len", "tokens of a sequence (default 16384)"),
        ("batch", "sequences of a step, over all ranks (default 1)"),
        ("steps", "updates, those of a resumed run included (default 20)"),
        ("dim", "features of a token (default 128)"),
        ("layers", "transformer blocks (default 2)"),
        ("heads", "query heads (default 4)"),
        ("kv-heads", "key heads (default 2)"),
        ("seed", "of the weights and of the order of documents (default 0)"),
        ("save-every", "steps from checkpoint to checkpoint (default: only one, at the end)"),
        ("keep", "checkpoints that stay, the newest (default 3)"),
        ("keep-every", "keep those whose step it divides, too (default: none)"),
        (
            "check-replicas",
            "steps from one comparison of the ranks' copies of the parameters to the next (default: none)",
        ),
    ]
    for name, text in sizes:
        parser.add_argument(f"--{name}", type=int, metavar="N", help=text)
    parser.add_argument("--learning-rate", type=float, metavar="X", help="of AdamW (default 0.003)")
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="S",
        help="seconds that a rank may keep others waiting before it is named and the run ends, three times as many in "
        "the first step, a save or a load (default 300)",
    )
    parser.add_argument("--mask", metavar="NAME", help="documents (default) or causal")
    parser.add_argument(
        "--exchange",
        metavar="NAME",
        help="auto (default), ring, allgather, ulysses or sparse: how keys travel",
    )
    parser.add_argument("--out", metavar="DIR", help="checkpoint, figures and page (default longmesh-train)")
    parser.add_argument("--resume", metavar="DIR", help="go on from another run's --out, on any mesh")
    parser.add_argument("--baseline", metavar="DIR", help="compare with another run's --out")
    parser.add_argument(
        "--force",
        action="store_true",
        help="use --out though another run seems to: if you know that it has ended",
    )
    parser.add_argument(
        "--compare", action="store_true", help="first run the same in one process, then compare with it"
    )


def run_train(options: argparse.Namespace) -> int:
    """Run the command; its exit code."""
    told = {name: value for name, value in vars(options).items() if name not in LAUNCH}
    world_size = _torchrun_world_size()
    ranks = getattr(options, "ranks", world_size or 1)
    threads = getattr(options, "threads", None)
    compare = getattr(options, "compare", False)
    told.setdefault("context", max(1, ranks // (told.get("data", 1) * told.get("tensor", 1) or 1)))
    problem = find_problem(told, ranks, threads, compare, world_size)
    if problem is not None:
        print(f"longmesh train: {problem}", file=sys.stderr)
        return 2
    if world_size is not None:
        sys.argv = [PROGRAM, json.dumps(told)]
        runpy.run_module(PROGRAM, run_name="__main__")
        return 0
    if compare:
        out = Path(told.get("out", "longmesh-train"), "one-process")
        alone = {name: value for name, value in told.items() if name not in ("resume", "baseline")}
        alone |= {"data": 1, "context": 1, "tensor": 1, "out": str(out)}
        code = _start(alone, 1, threads and threads * ranks)
        if code != 0:
            return code
        told["baseline"] = str(out)
    return _start(told, ranks, threads)


def find_problem(
    told: dict[str, Any], ranks: int, threads: int | None, compare: bool, world_size: int | None
) -> str | None:
    """What is wrong with the arguments that say where to run, in words; None if nothing is."""
    if ranks < 1:
        return f"--ranks {ranks}: a run has at least 1 rank"
    if threads is not None and threads < 1:
        return f"--threads {threads}: a rank has at least 1 thread; leave it out to share the cores"
    if world_size is not None and ranks != world_size:
        return f"--ranks {ranks}: torchrun has started {world_size}; leave it out, or start as many"
    if world_size is not None and compare:
        return (
            "--compare starts a process of its own, which torchrun's ranks can't; run `longmesh train --ranks 1 --out "
            "ONE` with the same options first, then give --baseline ONE here"
        )
    if not 0 < told.get("timeout", 1.0) < float("inf"):
        return f"--timeout {told['timeout']:g}: give a positive number of seconds"
    data, context, tensor = (told.get(name, 1) for name in ("data", "context", "tensor"))
    if data * context * tensor != ranks:
        return (
            f"--data {data} x --context {context} x --tensor {tensor} make {data * context * tensor} ranks, and "
            f"{ranks} run; the product must be the number of ranks"
        )
    return None


def _torchrun_world_size() -> int | None:
    """How many ranks torchrun has started, if this is one of them."""
    return (
        int(os.environ["WORLD_SIZE"]) if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys() else None
    )


def _start(told: dict[str, Any], ranks: int, threads: int | None) -> int:
    """Run the program on local ranks; rank 0 may draw on the terminal that its pipe hides from it."""
    from longmesh.cli.ranks import WaitLimits  # --help need not wait for the launcher
    from longmesh.cli.run import run_script

    spec = find_spec(PROGRAM)
    assert spec is not None and spec.origin is not None
    program = Path(spec.origin).with_name("__main__.py")
    is_terminal = sys.stdout.isatty()
    if is_terminal:
        told = told | {"terminal": os.ttyname(sys.stdout.fileno())}
    with _restored_environment():
        start_s = START_TIMEOUTS * told.get("timeout", DEFAULT_TIMEOUT)
        code = run_script(
            str(program),
            [json.dumps(told)],
            num_ranks=ranks,
            num_threads=threads,
            limits=WaitLimits(start_s, start_s),
            command="longmesh train",
        )
    if is_terminal:
        print("\x1b[?25h", end="", flush=True)  # a bar that was ended leaves the cursor hidden
    return code


@contextlib.contextmanager
def _restored_environment() -> Iterator[None]:
    """The launcher sets variables for its ranks; a second run starts from ours."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
