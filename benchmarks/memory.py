"""Memory and time of long sequences: losses by tiles against all logits, and the longest sequence that trains in 2 GiB.

    python benchmarks/memory.py [--tokens 1024] [--memory-tokens 32768] [--classes 32000] [--hidden 1024] [--rounds 3]

Extra memory is the peak of a process beside what it held before the call, each side in a process of its own. The plain
side is measured at a quarter of the tokens and multiplied, since it grows with them. Time is the median of ratios of
processor time, both sides in turn. The longest sequence is that of the plain scope on 2 ranks whose extra memory
is limited to 2 GiB each: a small Llama-like model in a scope. With tiled MLPs, tiled loss and checkpoints four times as
many tokens are tried, and must fit.
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

MIB = 2**20
LIMIT_MIB = 2048


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


def head_memory(kind: str, tokens: int, classes: int, hidden: int) -> float:
    torch.set_num_threads(2)
    step = head_step(kind, tokens, classes, hidden)
    head_step(kind, 8, classes, hidden)()  # what libraries keep for themselves
    mib = extra_mib(step)
    torch.set_num_threads(1)
    return mib


def head_times(tokens: int, classes: int, hidden: int, rounds: int) -> dict[str, float]:
    """Each kind's processor time against the plain one's: medians over rounds."""
    steps = {kind: head_step(kind, tokens, classes, hidden) for kind in ("plain", "tiled", "logprobs")}
    seconds: dict[str, list[float]] = {kind: [] for kind in steps}
    for _ in range(rounds):
        for kind, step in steps.items():
            start = time.process_time()
            step()
            seconds[kind].append(time.process_time() - start)
    return {
        kind: statistics.median(a / b for a, b in zip(seconds[kind], seconds["plain"], strict=True))
        for kind in seconds
    }


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


def longest(pool: RankPool, sizes: tuple[int, int, int]) -> tuple[int, float]:
    """The longest sequence that the plain scope trains within the limit, and its memory: by how that grows."""
    few, more = (max(pool.run(train_step, n, False, *sizes, ranks=2, timeout=600.0)) for n in (2048, 6144))
    tokens = int(2048 + (LIMIT_MIB - few) / (more - few) * 4096) // 512 * 512
    while (mib := max(pool.run(train_step, tokens, False, *sizes, ranks=2, timeout=600.0))) > LIMIT_MIB:
        tokens -= 512
    return tokens, mib


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Memory and time of long sequences.")
    for name, value in {
        "tokens": 1024,
        "memory-tokens": 32768,
        "classes": 32000,
        "hidden": 1024,
        "rounds": 3,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--no-longest", action="store_true", help="leave out the longest sequence")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    console = Console(width=110)
    with RankPool(2) as pool:
        quarter = options.memory_tokens // 4
        plain = (
            4
            * pool.run(
                head_memory, "plain", quarter, options.classes, options.hidden, ranks=1, timeout=600.0
            )[0]
        )
        memory = {
            kind: pool.run(
                head_memory,
                kind,
                options.memory_tokens,
                options.classes,
                options.hidden,
                ranks=1,
                timeout=600.0,
            )[0]
            for kind in ("tiled", "logprobs")
        }
        times = head_times(options.tokens, options.classes, options.hidden, options.rounds)
        table = Table(title=f"a head: {options.classes} classes, hidden {options.hidden}, fp32")
        for column in (
            "loss",
            f"extra MiB at {options.memory_tokens} tokens",
            "of plain",
            f"time of plain at {options.tokens} tokens",
        ):
            table.add_column(column, justify="right")
        table.add_row("plain", f"{plain:.0f}", "1.000", "1.00")
        for kind, name in (("tiled", "tiled_cross_entropy"), ("logprobs", "token_logprobs")):
            table.add_row(name, f"{memory[kind]:.0f}", f"{memory[kind] / plain:.3f}", f"{times[kind]:.2f}")
        console.print(table)
        if not options.no_longest:
            console.print(longest_table(pool))


def longest_table(pool: RankPool) -> Table:
    sizes = (2, 128, 32000)
    table = Table(title=f"training in {LIMIT_MIB} MiB a rank, 2 ranks: 2 layers of 128, 32000 classes, fp32")
    for column in ("scope", "tokens", "MiB a rank", "of plain's longest"):
        table.add_column(column, justify="right")
    tokens, mib = longest(pool, sizes)
    table.add_row("plain, its longest", str(tokens), f"{mib:.0f}", "1.0")
    for times in (1, 4):
        mib = max(pool.run(train_step, times * tokens, True, *sizes, ranks=2, timeout=600.0))
        table.add_row("tiled MLP, tiled loss, checkpoints", str(times * tokens), f"{mib:.0f}", f"{times:.1f}")
    return table


if __name__ == "__main__":
    main()
