"""The command `longmesh plan`: arguments, and checks of them that need no torch."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from longmesh.cli.arguments import number, refuse, suggest, token_count, whole_number
from longmesh.cli.doctor.command import find_file_problem
from longmesh.errors import LongmeshError
from longmesh.plan.gpus import GPUS
from longmesh.plan.named_clusters import find_cluster_problem
from longmesh.step.known_models import KNOWN_MODELS, find_known
from longmesh.step.setting import memory_size

PROGRAM = "longmesh plan"
MOST_RANKS = 1 << 20
AXES = ("dp", "cp", "tp", "ep")
RECOMPUTE, OPTIMIZERS = ("none", "selective", "full"), ("adamw", "adamw-offload", "none")
EXCHANGES = ("auto", "sparse", "ring", "ulysses", "allgather", "cheapest")


def add_parser(commands: Any) -> None:
    """Add `plan` to the commands of a parser."""
    parser = commands.add_parser(
        "plan",
        help="predict time and memory of a training step, and find the best mesh",
        description="Predict how long a training step or a prefill takes and how much memory it needs, for a model, a "
        "length and GPUs that need not be there, and find the mesh that is fastest. Needs longmesh[hf].",
    )
    parser.add_argument(
        "config", help="a config.json, a folder with one, or the name of a model that ships with us"
    )
    parser.add_argument("--seq-len", type=token_count, required=True, metavar="N", help="tokens per sequence")
    parser.add_argument("--gpus", type=gpus, metavar="COUNTxNAME", help=f"such as 8xH100; {', '.join(GPUS)}")
    parser.add_argument(
        "--cluster", metavar="FILE", help="a measured cluster instead of --gpus (longmesh doctor --save)"
    )
    parser.add_argument("--ranks", type=whole_number, metavar="N", help="ranks of --cluster")
    parser.add_argument(
        "--memory", type=memory, metavar="SIZE", help="of one GPU, such as 80GB (default: the GPU's)"
    )
    parser.add_argument("--mesh", type=mesh, metavar="cp=8,tp=1", help="fix the mesh; axes not named are 1")
    parser.add_argument(
        "--batch",
        type=whole_number,
        metavar="N",
        help="sequences per step over all ranks (default: one per dp rank)",
    )
    parser.add_argument("--batch-tokens", type=token_count, metavar="N", help="the same in tokens")
    parser.add_argument(
        "--rows",
        type=whole_number,
        metavar="N",
        help="sequences at a time on a rank (default: all of a rank's)",
    )
    parser.add_argument(
        "--documents", metavar="FILE", help="lengths of the documents of a sequence, one per line"
    )
    parser.add_argument(
        "--recompute", choices=RECOMPUTE, help="of layers in backward (default: the fastest that fits)"
    )
    parser.add_argument(
        "--offload", action="store_true", help="saved inputs of layers live in the host's memory"
    )
    parser.add_argument(
        "--dtype", choices=("bf16", "fp32"), default="bf16", help="of computing (default bf16)"
    )
    parser.add_argument(
        "--param-dtype",
        choices=("bf16", "fp32"),
        help="of parameters, gradients and states that a rank keeps (default: as --dtype)",
    )
    parser.add_argument(
        "--sequence-parallel", action="store_true", help="between blocks, tokens are sharded over tp"
    )
    parser.add_argument(
        "--matmul-dtype", choices=("bf16", "float8"), default="bf16", help="of linear layers (default bf16)"
    )
    parser.add_argument(
        "--optimizer", choices=OPTIMIZERS, default="adamw", help="none: a prefill (default adamw)"
    )
    parser.add_argument(
        "--loss",
        choices=("whole", "tiled"),
        help="logits of all tokens at once, or by tiles (default: the fastest that fits)",
    )
    parser.add_argument(
        "--exchange", choices=EXCHANGES, default="auto", help="of keys between ranks (default auto)"
    )
    parser.add_argument("--compiled", action="store_true", help="torch.compile fuses memory-bound ops")
    parser.add_argument(
        "--attention-tflops", type=number, metavar="X", help="the rate of the attention kernel, forward"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--out", metavar="FILE", help="write a page with charts")


def gpus(text: str) -> tuple[int, str]:
    """`8xH100`: how many, and which."""
    found = re.fullmatch(r"(\d+)\s*[xX*]\s*([A-Za-z][\w-]*)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not COUNTxNAME, such as 8xH100")
    name = found[2].lower()
    if name not in GPUS:
        raise argparse.ArgumentTypeError(
            f"{found[2]!r} is not known{suggest(name, GPUS)}; use one of {', '.join(GPUS)}"
        )
    if not 1 <= int(found[1]) <= MOST_RANKS:
        raise argparse.ArgumentTypeError(f"{found[1]} GPUs: give 1 to {MOST_RANKS}")
    return int(found[1]), name


def mesh(text: str) -> dict[str, int]:
    """`cp=8,tp=2`: sizes by axis."""
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name.strip() not in AXES or not size.strip().isdigit() or int(size) < 1 or name.strip() in found:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a mesh; give axes of {', '.join(AXES)}, such as cp=8,tp=1"
            )
        found[name.strip()] = int(size)
    return found


def memory(text: str) -> float:
    """`80GB`, `96 GiB`, in bytes."""
    try:
        return memory_size(text)
    except LongmeshError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run_plan(options: argparse.Namespace) -> int:
    """Run the command `plan`; its exit code."""
    problem = find_problem(options)
    if problem is not None:
        return refuse(PROGRAM, problem)
    from longmesh.cli.plan.program import run  # --help and mistakes need not wait for torch

    return run(options)


def find_problem(options: argparse.Namespace) -> str | None:
    """What is wrong with the arguments, in words; None if nothing is."""
    if (options.gpus is None) == (options.cluster is None):
        return "give --gpus COUNTxNAME, or --cluster FILE with --ranks N"
    if options.cluster is not None:
        problem = find_cluster_problem(options.cluster)
        if problem is not None:
            return f"--cluster {options.cluster}: {problem}"
        if options.ranks is None or not 1 <= options.ranks <= MOST_RANKS:
            return f"--ranks {options.ranks}: give the number of ranks of --cluster, 1 to {MOST_RANKS}"
    elif options.ranks is not None:
        return f"--ranks {options.ranks}: --gpus says how many there are; leave it out"
    count = int(options.gpus[0] if options.gpus else options.ranks or 0)
    if options.seq_len < 1:
        return f"--seq-len {options.seq_len}: a sequence has at least 1 token"
    for name in ("batch", "batch_tokens", "rows"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            return f"--{name.replace('_', '-')} {getattr(options, name)}: give 1 or more"
    if options.batch_tokens is not None and (
        options.batch is not None or options.batch_tokens % options.seq_len
    ):
        return f"--batch-tokens {options.batch_tokens}: give a multiple of --seq-len {options.seq_len}, without --batch"
    if options.offload and options.recompute == "none":
        return "--offload: inputs of layers go to the host, so --recompute must be selective or full"
    if options.attention_tflops is not None and not options.attention_tflops > 0:
        return f"--attention-tflops {options.attention_tflops:g}: give a positive number"
    if options.memory is not None and not options.memory > 0:
        return "--memory: give a positive size"
    if options.out is not None:
        problem = find_file_problem(options.out)
        if problem is not None:
            return f"--out {options.out or repr(options.out)}: {problem}"
    return _mesh_problem(options, count) or _documents_problem(options) or _config_problem(options.config)


def _mesh_problem(options: argparse.Namespace, count: int) -> str | None:
    if options.mesh is None:
        return None
    ranks = 1
    for size in options.mesh.values():
        ranks *= size
    shown = ",".join(f"{name}={size}" for name, size in options.mesh.items())
    if ranks != count:
        return f"--mesh {shown}: its axes multiply to {ranks}, and there are {count} ranks; make them equal"
    if options.mesh.get("cp", 1) > options.seq_len:
        return f"--mesh {shown}: {options.seq_len} tokens can't be cut over cp={options.mesh['cp']} ranks"
    replicas = options.mesh.get("dp", 1) * options.mesh.get("ep", 1) * (options.rows or 1)
    batch = batch_of(options)
    if batch is not None and batch % replicas:
        return f"--batch {batch}: {replicas} sequences run at a time on mesh {shown}; give a multiple"
    return None


def batch_of(options: argparse.Namespace) -> int | None:
    """Sequences of a step, if given."""
    return options.batch if options.batch_tokens is None else options.batch_tokens // options.seq_len


def _documents_problem(options: argparse.Namespace) -> str | None:
    if options.documents is None:
        return None
    try:
        lengths = read_lengths(options.documents)
    except OSError as error:
        return f"--documents {options.documents}: it can't be read: {error.strerror}"
    except ValueError:
        return f"--documents {options.documents}: give one whole number above 0 per line"
    if sum(lengths) != options.seq_len:
        return f"--documents {options.documents}: lengths add up to {sum(lengths)}, not to --seq-len {options.seq_len}"
    return None


def read_lengths(path: str) -> tuple[int, ...]:
    """Lengths of documents, one per line."""
    lengths = tuple(int(line) for line in Path(path).read_text().split())
    if not lengths or min(lengths) < 1:
        raise ValueError("lengths must be above 0")
    return lengths


def _config_problem(name: str) -> str | None:
    path = Path(name)
    if path.exists():
        try:
            return None if read_config(name) else f"{name}: it has no model_type; give a model's config.json"
        except OSError as error:
            return f"{name}: no config.json can be read there: {error.strerror}"
        except ValueError:
            return f"{name} is not a config.json: it holds no JSON object"
    if find_known(name) is not None:
        return None
    close = suggest(name, KNOWN_MODELS)
    known = ", ".join(KNOWN_MODELS)
    return (
        f"{name}: no such file, and no model that ships with us{close}; give a config.json, or one of {known}"
    )


def read_config(name: str) -> dict[str, Any] | None:
    """What the file says; None if it does not say which model it is."""
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    found = json.loads(path.read_text())
    if not isinstance(found, dict):
        raise ValueError("not an object")
    return found if "model_type" in found else None
