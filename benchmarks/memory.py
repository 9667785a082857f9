"""Memory and time of tiled losses relative to plain ones, and the longest sequence that trains in 2 GiB.

    python benchmarks/memory.py --part memory    extra memory of a head and its loss at 32 Ki tokens: 2 minutes
    python benchmarks/memory.py --part time      their time against the plain loss: 1 minute, on a quiet machine
    python benchmarks/memory.py --part longest   the longest sequence of a plain scope, and of one that saves: 2 minutes

Extra memory is the peak memory of a process minus what it held before the call; each measurement has its own process.
The plain head would need 12 GiB, so it is measured at 4 Ki and 8 Ki tokens and extrapolated: it grows by the same
amount with each token. Times are wall-clock times of both sides, run alternately, and the ratio is the median.

The longest sequence is the longest for which a small Llama-like model on 2 ranks needs at most 2 GiB of extra memory
per rank. With tiled MLPs, the tiled loss and checkpointing, four times as many tokens are tried.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from longmesh import tiled, tiled_cross_entropy, token_logprobs
from longmesh.experimental import context_parallel
from longmesh.testing import RankPool, cpu_mesh

LIMIT_MIB = 2048
TIMEOUT = 300.0
KINDS = {"plain": "plain", "tiled": "tiled_cross_entropy", "logprobs": "token_logprobs"}


def status_mib(name: str) -> float:
    """A line of this process's status, in MiB."""
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(name + ":")) / 1024


def extra_mib(step: Callable[[], Any]) -> float:
    """The peak of memory during a call, beside what was held before it."""
    before = status_mib("VmRSS")
    with open("/proc/self/clear_refs", "w", encoding="ascii") as reset:
        reset.write("5")  # the peak starts again
    step()
    return status_mib("VmHWM") - before


def head_step(kind: str, tokens: int, classes: int, hidden: int) -> Callable[[], Any]:
    """Forward and backward of a head and its loss."""
    torch.manual_seed(0)
    states = torch.randn(tokens, hidden, requires_grad=True)
    weight = (torch.randn(classes, hidden) * 0.05).requires_grad_()
    labels = torch.randint(classes, (tokens,))
    losses = {
        "plain": lambda: F.cross_entropy(F.linear(states, weight), labels),
        "tiled": lambda: tiled_cross_entropy(states, weight, labels),
        "logprobs": lambda: token_logprobs(states, weight, labels).mean(),
    }

    def step() -> None:
        states.grad = weight.grad = None
        losses[kind]().backward()

    return step


def head_memory(kind: str, tokens: int, classes: int, hidden: int, threads: int) -> float:
    torch.set_num_threads(threads)
    step = head_step(kind, tokens, classes, hidden)
    head_step(kind, 8, classes, hidden)()  # what libraries keep for themselves
    return extra_mib(step)


def most(ranks: int, step: Callable[..., float], *args: Any) -> float:
    """What the rank with most says, each in a new process: one that ran before keeps memory for later."""
    with RankPool(ranks) as pool:
        return max(pool.run(step, *args, ranks=ranks, timeout=TIMEOUT))


def memory_table(options: argparse.Namespace) -> Table:
    def measured(kind: str, tokens: int) -> float:
        return most(1, head_memory, kind, tokens, options.classes, options.hidden, options.threads)

    tokens = options.memory_tokens
    few, more = measured("plain", tokens // 8), measured("plain", tokens // 4)
    found = {"plain": few + 7 * (more - few)}
    found |= {kind: measured(kind, tokens) for kind in ("tiled", "logprobs")}
    table = Table(title=f"a head: {tokens} tokens, {options.classes} classes, hidden {options.hidden}, fp32")
    for column in ("loss", "extra MiB", "of plain"):
        table.add_column(column, justify="right")
    for kind, mib in found.items():
        table.add_row(KINDS[kind], f"{mib:.0f}", f"{mib / found['plain']:.3f}")
    return table


def time_table(options: argparse.Namespace) -> Table:
    torch.set_num_threads(options.threads)
    steps = {kind: head_step(kind, options.tokens, options.classes, options.hidden) for kind in KINDS}
    seconds: dict[str, list[float]] = {kind: [] for kind in steps}
    for turn in range(options.rounds + 1):
        for kind, step in steps.items():
            start = time.perf_counter()
            step()
            if turn:  # the first warms up
                seconds[kind].append(time.perf_counter() - start)
    table = Table(
        title=f"a head: {options.tokens} tokens, {options.classes} classes, hidden {options.hidden}, fp32"
    )
    for column in ("loss", "seconds", "of plain"):
        table.add_column(column, justify="right")
    for kind, mine in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(mine, seconds["plain"], strict=True))
        table.add_row(KINDS[kind], f"{statistics.median(mine):.2f}", f"{ratio:.2f}")
    return table


class Layer(nn.Module):
    """Attention and a gated MLP, as in Llama."""

    def __init__(self, size: int, heads: int, is_tiled: bool) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.RMSNorm(size), nn.RMSNorm(size)])
        self.qkv, self.out = nn.Linear(size, 3 * size, bias=False), nn.Linear(size, size, bias=False)
        mlp = nn.Sequential(nn.Linear(size, 4 * size), nn.SiLU(), nn.Linear(4 * size, size))
        self.mlp = tiled(mlp) if is_tiled else mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).transpose(-3, -2)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(out.transpose(-3, -2).flatten(-2))
        return x + self.mlp(self.norms[1](x))


def train_step(tokens: int, saves: bool, layers: int, size: int, classes: int) -> float:
    """One step on this rank's part of a sequence: its extra memory in MiB."""
    torch.manual_seed(0)
    model = nn.ModuleList(Layer(size, 4, saves) for _ in range(layers))
    table = nn.Embedding(classes, size)
    mesh = cpu_mesh(2)
    ids = torch.arange(tokens).remainder(classes)[None]
    labels = ids.roll(-1)

    def step() -> None:
        with context_parallel(mesh, buffers=[ids, labels], buffer_seq_dims=[1, 1]):
            x = table(ids)
            for layer in model:
                x = checkpoint(layer, x, use_reentrant=False) if saves else layer(x)
            if saves:
                loss = tiled_cross_entropy(x, table.weight, labels, num_items=tokens)
            else:
                logits = F.linear(x, table.weight)
                loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / tokens
            loss.backward()

    return extra_mib(step)


def longest(run: Callable[[int, bool], float]) -> tuple[int, float]:
    """The longest sequence that the plain scope trains within the limit, and its memory: by how that grows."""
    few, more = run(2048, False), run(6144, False)
    tokens = int(2048 + (LIMIT_MIB - few) / (more - few) * 4096) // 256 * 256
    while (mib := run(tokens, False)) > LIMIT_MIB:
        tokens -= 256
    return tokens, mib


def longest_table(options: argparse.Namespace) -> Table:
    def run(tokens: int, saves: bool) -> float:
        return most(2, train_step, tokens, saves, options.layers, options.size, options.classes)

    table = Table(
        title=f"training in {LIMIT_MIB} MiB a rank, 2 ranks: {options.layers} layers of {options.size}, "
        f"MLPs of {4 * options.size}, {options.classes} classes, fp32"
    )
    for column in ("scope", "tokens", "MiB a rank", "of plain's longest"):
        table.add_column(column, justify="right")
    tokens, mib = longest(run)
    table.add_row("plain, its longest", str(tokens), f"{mib:.0f}", "1")
    for times in options.times:
        mib = run(times * tokens, True)
        table.add_row("tiled MLP, tiled loss, checkpoints", str(times * tokens), f"{mib:.0f}", str(times))
    return table


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Memory and time of long sequences.")
    parser.add_argument("--part", choices=("memory", "time", "longest", "all"), default="all")
    sizes = {
        "classes": 32000,
        "hidden": 1024,
        "memory-tokens": 32768,
        "tokens": 2048,
        "rounds": 3,
        "threads": 2,
        "layers": 2,
        "size": 128,
    }
    parser.add_argument(
        "--times", type=int, nargs="*", default=[4], help="how many times the longest is tried"
    )
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    console = Console(width=110)
    if options.part in ("memory", "all"):
        console.print(memory_table(options))
    if options.part in ("longest", "all"):
        console.print(longest_table(options))
    if options.part in ("time", "all"):
        console.print(time_table(options))


if __name__ == "__main__":
    main()
