"""Recurrent layers: 2 ranks x 1 thread against the same kernels in one process x 2 threads, and other figures.

    python benchmarks/recurrent.py [--tokens 16384] [--repeat 3]

`ratio` is the median over repetitions of forward + backward, both sides in turn. `per token` is the time of one process
for a token of a sequence 4 times as long, over that for a token of the short one: 1 means that time grows with the
length and no more. The gated delta rule is also compared with transformers' own torch path, whose backward grows with
the square. `error` is that of fp32 on 1 rank and on 8 against fp64, the worst output over the largest.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from longmesh.recurrent import RecurrentParallel
from longmesh.testing import RankPool, cpu_mesh

HEADS, DIM, CHANNELS, STATES = 4, 64, 256, 16
KERNELS = (
    "gated delta rule",
    "its diagonal form",
    "linear attention",
    "ssd",
    "selective scan",
    "convolution",
)


def inputs_of(kernel: str, tokens: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    per_head = (1, tokens, HEADS)
    k = torch.nn.functional.normalize(normal(*per_head, DIM), dim=-1)
    qkv = [normal(*per_head, DIM), k, normal(*per_head, DIM)]
    drawn = {
        "gated delta rule": lambda: [*qkv, -uniform(*per_head), uniform(*per_head)],
        "its diagonal form": lambda: [*qkv, -uniform(*per_head, DIM), uniform(*per_head)],
        "linear attention": lambda: [*qkv, -uniform(*per_head)],
        "ssd": lambda: [
            normal(*per_head, DIM), uniform(*per_head), -uniform(HEADS),
            normal(1, tokens, 1, DIM), normal(1, tokens, 1, DIM),
        ],
        "selective scan": lambda: [
            normal(1, CHANNELS, tokens), uniform(1, CHANNELS, tokens), -uniform(CHANNELS, STATES),
            normal(1, STATES, tokens), normal(1, STATES, tokens),
        ],
        "convolution": lambda: [normal(1, 4 * CHANNELS, tokens), normal(4 * CHANNELS, 4), normal(4 * CHANNELS)],
    }[kernel]()  # fmt: skip
    return [x.to(dtype) for x in drawn]


def method_of(rp: RecurrentParallel, kernel: str) -> Callable[..., Tensor]:
    return {
        "gated delta rule": rp.gated_delta_rule,
        "its diagonal form": rp.gated_delta_rule,
        "linear attention": rp.linear_attention,
        "ssd": rp.ssd,
        "selective scan": rp.selective_scan,
        "convolution": rp.causal_conv1d,
    }[kernel]


def token_dim(kernel: str) -> int:
    return 2 if kernel in ("selective scan", "convolution") else 1


@functools.cache
def prepared(ranks: int, kernel: str, tokens: int) -> tuple[RecurrentParallel, list[Tensor]]:
    rp = RecurrentParallel(cpu_mesh(ranks) if ranks else None, seq_len=tokens)
    whole, dim = inputs_of(kernel, tokens), token_dim(kernel)
    parts = [
        rp.shard(x, dim).contiguous() if x.ndim >= 3 and x.shape[dim] == tokens else x.clone() for x in whole
    ]
    return rp, [x.requires_grad_() for x in parts]


def step(ranks: int, kernel: str, tokens: int) -> float:
    """Seconds of one forward and backward."""
    rp, inputs = prepared(ranks, kernel, tokens)
    start = time.perf_counter()
    out = method_of(rp, kernel)(*inputs)
    torch.autograd.backward(out, torch.ones_like(out))
    return time.perf_counter() - start


def transformers_step(tokens: int) -> float:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    q, k, v, g, beta = (x.requires_grad_() for x in inputs_of("gated delta rule", tokens))
    start = time.perf_counter()
    out, _ = torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta)
    torch.autograd.backward(out, torch.ones_like(out))
    return time.perf_counter() - start


def error(ranks: int, kernel: str, tokens: int) -> float:
    rp = RecurrentParallel(cpu_mesh(ranks), seq_len=tokens)
    exact = RecurrentParallel(None, seq_len=tokens)
    whole, dim = inputs_of(kernel, tokens, torch.float64), token_dim(kernel)
    wanted = method_of(exact, kernel)(*whole)
    parts = [rp.shard(x, dim) if x.ndim >= 3 and x.shape[dim] == tokens else x for x in whole]
    found = rp.unshard(method_of(rp, kernel)(*(x.float() for x in parts)), dim)
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    tokens, short = options.tokens, options.tokens // 4
    table = Table("kernel", "one process s", "2 ranks s", "ratio", "per token", "error 1", "error 8")
    with RankPool(8) as many:
        errors = {
            kernel: [
                max(many.run(error, ranks, kernel, 2048, ranks=ranks, timeout=300.0)) for ranks in (1, 8)
            ]
            for kernel in KERNELS
        }
    with RankPool(2) as pool:  # before this process runs anything on two threads
        torch.set_num_threads(2)
        for kernel in KERNELS:
            pairs, shorts = [], []
            for _ in range(options.repeat + 1):
                alone = step(0, kernel, tokens)
                together = max(pool.run(step, 2, kernel, tokens, ranks=2, timeout=600.0))
                pairs.append((alone, together))
                shorts.append(step(0, kernel, short))
            pairs, shorts = pairs[1:], shorts[1:]
            ratio = statistics.median(b / a for a, b in pairs)
            grown = statistics.median(a for a, _ in pairs) / statistics.median(shorts) * short / tokens
            table.add_row(
                kernel,
                f"{statistics.median(a for a, _ in pairs):.3f}",
                f"{statistics.median(b for _, b in pairs):.3f}",
                f"{ratio:.2f}",
                f"{grown:.2f}",
                *(f"{e:.1e}" for e in errors[kernel]),
            )
        theirs, ours = [], []
        for _ in range(2):
            theirs.append(transformers_step(tokens))
            ours.append(max(pool.run(step, 2, "gated delta rule", tokens, ranks=2, timeout=600.0)))
    Console(width=120).print(table)
    print(
        f"gated delta rule, {tokens} tokens, {HEADS} heads of {DIM}: 2 ranks take {min(ours):.2f} s, transformers' "
        f"torch path in one process x 2 threads {min(theirs):.2f} s: {min(ours) / min(theirs):.2f}"
    )


if __name__ == "__main__":
    main()
