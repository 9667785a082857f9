"""The command `longmesh generate`: on local ranks that it starts, or as a rank of torchrun's."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from longmesh.cli.arguments import Launch, RankRange, flag, number, refuse, token_count, whole_number
from longmesh.cli.generate.find_model import find_model_problem
from longmesh.plan.named_clusters import find_cluster_problem

DTYPES = ("float64", "float32", "bfloat16", "float16")
LARGEST = 1 << 31
SIZES = {"random_tokens": 1, "new_tokens": 1, "page": 1, "chunk": 1, "seed": 0}


def add_parser(commands: Any) -> None:
    """Add `generate` to the commands of a parser."""
    parser = commands.add_parser(
        "generate",
        help="continue a long prompt with a KV cache that is sharded over ranks",
        description="Continue a prompt of any length, greedily, with the model's KV cache in pages over local ranks. "
        "Each rank computes and holds its part of the prompt, and the tokens are those of one process. Prints "
        "tokens per second and the memory of each rank. Under torchrun it uses torchrun's ranks. Needs longmesh[hf].",
    )
    parser.add_argument("--ranks", type=whole_number, metavar="N", help="processes to start (default 2)")
    parser.add_argument(
        "--threads",
        type=whole_number,
        metavar="N",
        help="threads per rank (default: the cores divided by the ranks)",
    )
    parser.add_argument(
        "--timeout",
        type=number,
        metavar="S",
        help="name a rank that keeps others waiting for S seconds and end the run (default 900)",
    )
    parser.add_argument("--prompt", metavar="FILE", help="a text file, UTF-8")
    parser.add_argument(
        "--random-tokens", type=token_count, metavar="N", help="a prompt of N random tokens (default 4096)"
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="a causal model of transformers: a folder or a name (default: a tiny random one)",
    )
    parser.add_argument(
        "--new-tokens",
        type=token_count,
        default=32,
        metavar="N",
        help="tokens to generate, at most (default 32)",
    )
    parser.add_argument("--dtype", metavar="NAME", help=f"{', '.join(DTYPES)} (default: the model's)")
    parser.add_argument(
        "--page", type=token_count, default=256, metavar="N", help="tokens per page (default 256)"
    )
    parser.add_argument(
        "--chunk",
        type=token_count,
        default=8192,
        metavar="N",
        help="prompt tokens per chunk (default 8192)",
    )
    parser.add_argument(
        "--cluster",
        metavar="NAME",
        help="the machine to plan for: a file of longmesh doctor --save, or cpu, a100 or h100 (default: the device's)",
    )
    parser.add_argument(
        "--seed", type=whole_number, default=0, metavar="N", help="seed of the random weights and tokens"
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="first run in one process with the same cores, then compare; exit code 1 if tokens differ",
    )


def run_generate(options: argparse.Namespace) -> int:
    """Run the command `generate`; its exit code."""
    under_launcher = "RANK" in os.environ
    problem = find_problem(options, under_launcher)
    if problem is not None:
        return refuse("longmesh generate", problem)
    told = {name: getattr(options, name) for name in (*SIZES, "model", "dtype")}
    told["cluster"] = options.cluster
    told["prompt"] = None if options.prompt is None else str(Path(options.prompt).absolute())
    if options.prompt is None and options.random_tokens is None:
        told["random_tokens"] = 4096
    if under_launcher:
        from longmesh.cli.generate import program  # --help need not wait for torch

        try:
            return program.main(told)
        except SystemExit as leaving:
            return refuse("longmesh generate", str(leaving.code))
    ranks = options.ranks or 2
    launch = Launch(RankRange(ranks, ranks), options.threads, options.timeout)
    if not options.compare:
        return _start(told, launch)
    with tempfile.TemporaryDirectory(prefix="longmesh-generate-") as folder:
        told["one_process"] = str(Path(folder, "one-process.json"))
        alone = launch._replace(ranks=RankRange(1, 1), threads=launch.threads and launch.threads * ranks)
        return _start(told | {"is_one_process": True}, alone) or _start(told, launch)


def _start(told: dict[str, Any], launch: Launch) -> int:
    from longmesh.cli.idle import WaitLimits
    from longmesh.cli.run import Program, run_program

    if sys.stdout.isatty():
        told = told | {"terminal": os.ttyname(sys.stdout.fileno())}
    program = Program(
        str(Path(__file__).with_name("program.py")),
        lambda num_ranks, again: [json.dumps(told)],
        WaitLimits.of(launch.timeout),
        command="longmesh generate",
    )
    return run_program(program, launch)


def find_problem(options: argparse.Namespace, under_launcher: bool) -> str | None:
    """What is wrong with the arguments, in words; None if nothing is."""
    if under_launcher and (options.ranks is not None or options.compare):
        given = "--compare" if options.ranks is None else f"--ranks {options.ranks}"
        return f"{given}: torchrun has started the ranks; leave it out"
    ranks = 2 if options.ranks is None else options.ranks
    problem = Launch(RankRange(ranks, ranks), options.threads, options.timeout).find_problem()
    if problem is not None:
        return problem
    for name, least in SIZES.items():
        value = getattr(options, name)
        if value is not None and not least <= value <= LARGEST:
            return f"{flag(name)} {value}: give {least} to {LARGEST}"
    if options.dtype is not None and options.dtype not in DTYPES:
        return f"--dtype {options.dtype or repr('')}: give one of {', '.join(DTYPES)}"
    if options.model == "":
        return "--model '': give a folder or a name; leave it out for a tiny random model"
    if options.cluster is not None and (problem := find_cluster_problem(options.cluster)) is not None:
        return f"--cluster {options.cluster or repr('')}: {problem}"
    if options.prompt is not None and options.random_tokens is not None:
        return "--prompt and --random-tokens: give one of them"
    if options.prompt is not None and (problem := find_text_problem(Path(options.prompt))) is not None:
        return problem
    if find_spec("transformers") is None:
        return "transformers is not installed; pip install 'longmesh[hf]'"
    if options.model is not None and (problem := find_model_problem(options.model)) is not None:
        return f"--model {options.model}: {problem}"
    return None


def find_text_problem(file: Path) -> str | None:
    """Why a file is no prompt, in words; None if it is one."""
    try:
        if file.is_dir():
            return f"--prompt {file}: it is a directory; give a text file"
        if not file.exists():
            return f"--prompt {file}: no such file (looked in {Path.cwd()}); give a text file"
        if not file.read_text(encoding="utf-8"):
            return f"--prompt {file}: it is empty; give a text, or --random-tokens N"
    except UnicodeDecodeError:
        return f"--prompt {file}: it is not UTF-8; give a text file"
    except OSError as error:
        return f"--prompt {file}: it can't be read: {error.strerror}; give a text file"
    return None
