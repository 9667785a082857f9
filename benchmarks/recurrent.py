"""Time of recurrent layers on 2 ranks x 1 thread relative to one process x 2 threads, and other figures.

    python benchmarks/recurrent.py [--tokens 16384] [--repeat 3] [--part kernels hybrid growth]

`ratio` compares forward + backward; both sides run alternately, and it is the median over repetitions. `error` is the
largest error of fp32 on 1 and on 8 ranks against fp64, divided by the largest output. The gated delta rule is also
compared with transformers' own torch path, whose backward takes quadratic time.

`hybrid` is a train step of 3 gated delta layers with their convolutions and 1 attention layer, on a quarter of the
tokens. `growth` is the time per token at 64 Ki tokens divided by that at 4 Ki, in one process: 1 means linear time. It
is measured with an allocator that keeps memory between calls, like jemalloc or a GPU's. (glibc maps new pages for every
tensor of 32 MiB or more, at about 2 us per page.)
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from longmesh.attention import ContextParallel, masks
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
    for x in inputs:
        x.grad = None
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


class Layer(torch.nn.Module):
    """Attention, or a gated delta rule behind a short convolution; then a feed-forward part."""

    def __init__(self, is_attention: bool) -> None:
        super().__init__()
        dim = HEADS * DIM
        self.is_attention = is_attention
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(dim) for _ in range(2))
        self.qkv, self.gates = torch.nn.Linear(dim, 3 * dim), torch.nn.Linear(dim, 2 * HEADS)
        self.conv = torch.nn.Parameter(torch.randn(3 * dim, 4) / 4)
        self.out = torch.nn.Linear(dim, dim)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(dim, 4 * dim), torch.nn.GELU(), torch.nn.Linear(4 * dim, dim)
        )

    def forward(self, x: Tensor, rp: RecurrentParallel, cp: ContextParallel) -> Tensor:
        h = self.norms[0](x)
        qkv = self.qkv(h)
        if self.is_attention:
            q, k, v = (part.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for part in qkv.chunk(3, -1))
            mixed = cp(q, k, v).transpose(1, 2).flatten(2)
        else:
            qkv = rp.causal_conv1d(qkv.mT, self.conv, None, "silu").mT
            q, k, v = (part.unflatten(-1, (HEADS, DIM)) for part in qkv.chunk(3, -1))
            g, beta = self.gates(h).chunk(2, -1)
            k = torch.nn.functional.normalize(k, dim=-1)
            out = rp.gated_delta_rule(q, k, v, -torch.nn.functional.softplus(g), beta.sigmoid())
            mixed = out.flatten(2)
        x = x + self.out(mixed)
        return x + self.mlp(self.norms[1](x))


@functools.cache
def prepared_hybrid(ranks: int, tokens: int) -> tuple:
    mesh = cpu_mesh(ranks) if ranks else None
    rp = RecurrentParallel(mesh, seq_len=tokens)
    cp = ContextParallel(
        mesh, seq_len=tokens, mask=masks.causal(), layout="ordered", num_heads=HEADS, head_dim=DIM
    )
    torch.manual_seed(0)
    model = torch.nn.ModuleList(Layer(is_attention) for is_attention in (False, False, False, True))
    x = rp.shard(torch.randn(1, tokens, HEADS * DIM), 1).contiguous()
    return model, torch.optim.AdamW(model.parameters()), x, rp, cp


def sum_gradients(parameters: list[torch.nn.Parameter]) -> None:
    """Over the ranks, in one all-reduce, as `longmesh train` and DDP's buckets do."""
    flat = torch.cat([p.grad.flatten() for p in parameters])
    torch.distributed.all_reduce(flat)
    for parameter, total in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = total.view_as(parameter)


def hybrid_step(ranks: int, tokens: int) -> float:
    """Seconds of one train step: forward, backward, sum of gradients, optimizer."""
    model, optimizer, x, rp, cp = prepared_hybrid(ranks, tokens)
    start = time.perf_counter()
    out = x
    for layer in model:
        out = layer(out, rp, cp)
    out.square().sum().div(tokens).backward()
    if ranks:
        sum_gradients([p for p in model.parameters() if p.grad is not None])
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - start


def hybrid(tokens: int, repeat: int) -> None:
    with RankPool(2) as pool:
        torch.set_num_threads(2)
        pairs = []
        for _ in range(repeat + 1):
            alone = hybrid_step(0, tokens)
            pairs.append((alone, max(pool.run(hybrid_step, 2, tokens, ranks=2, timeout=600.0))))
    alone, together = (statistics.median(side) for side in zip(*pairs[1:], strict=True))
    ratio = statistics.median(b / a for a, b in pairs[1:])
    print(
        f"hybrid train step, 3 recurrent : 1 attention, {tokens} tokens: 2 ranks {together:.2f} s, one process "
        f"{alone:.2f} s: {ratio:.2f}"
    )


def keep_memory() -> None:
    """Tell glibc to give no memory back, and to ask for none by pages of its own."""
    trim_threshold, mmap_max = -1, -4
    libc = ctypes.CDLL(None)
    assert libc.mallopt(trim_threshold, (1 << 31) - 1) and libc.mallopt(mmap_max, 0)


def growth() -> None:
    """Time of a token at 64 Ki tokens over that at 4 Ki, one process."""
    keep_memory()
    torch.set_num_threads(2)
    for kernel in KERNELS:
        for _ in range(2):  # the first makes the memory that is kept
            # As much work on both sides, or the short one is all caches and start-up.
            short = sum(step(0, kernel, 4096) for _ in range(16))
            ratio = step(0, kernel, 65536) / short
        print(f"{kernel}: 64 Ki tokens / 4 Ki, per token: {ratio:.2f}", flush=True)
        prepared.cache_clear()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument(
        "--part", nargs="+", choices=("kernels", "hybrid", "growth"), default=["kernels", "hybrid", "growth"]
    )
    options = parser.parse_args()
    if "kernels" in options.part:
        kernels(options.tokens, options.repeat)
    if "hybrid" in options.part:
        hybrid(options.tokens // 4, options.repeat)
    if "growth" in options.part:
        growth()


def kernels(tokens: int, repeat: int) -> None:
    table = Table("kernel", "one process s", "2 ranks s", "ratio", "error 1", "error 8")
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
            pairs = []
            for _ in range(repeat + 1):
                alone = step(0, kernel, tokens)
                together = max(pool.run(step, 2, kernel, tokens, ranks=2, timeout=600.0))
                pairs.append((alone, together))
            pairs = pairs[1:]
            ratio = statistics.median(b / a for a, b in pairs)
            table.add_row(
                kernel,
                f"{statistics.median(a for a, _ in pairs):.3f}",
                f"{statistics.median(b for _, b in pairs):.3f}",
                f"{ratio:.2f}",
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
