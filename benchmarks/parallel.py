"""Module styles and torch's own: host time, collectives, bytes, and overlap of a gather with its product.

    python benchmarks/parallel.py [--ranks 2] [--layers 4] [--repeat 5] [--rows 2048]

Both libraries run a stack of transformer blocks with tensor and sequence parallelism, forward and backward, in one
run. Host time is measured twice: on real ranks over gloo, and on a process group that sends nothing (`fake`). The
second shows the time of Python and C++ around the local ops. Tensors are tiny, so that arithmetic takes little time.
Collectives and bytes are counted where the libraries call torch.distributed, with the same formula for both.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as reference
import torch.distributed.tensor.parallel as reference_parallel
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import longmesh
import longmesh.parallel
from longmesh.testing import RankPool, cpu_mesh

Op = Callable[[], Any]
LIBRARIES = ((longmesh, longmesh.parallel), (reference, reference_parallel))


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.gelu(self.w1(x)))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention, self.feed_forward = Attention(dim, heads), FeedForward(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


def block_plan(lib: Any, styles: Any) -> dict[str, Any]:
    """Tensor and sequence parallelism, as in torch's tutorial."""
    return {
        "attention_norm": styles.SequenceParallel(),
        "attention": styles.PrepareModuleInput(
            input_layouts=lib.Shard(1), desired_input_layouts=lib.Replicate()
        ),
        "attention.w[qkv]": styles.ColwiseParallel(),
        "attention.wo": styles.RowwiseParallel(output_layouts=lib.Shard(1)),
        "ffn_norm": styles.SequenceParallel(),
        "feed_forward.w1": styles.ColwiseParallel(input_layouts=lib.Shard(1)),
        "feed_forward.w2": styles.RowwiseParallel(output_layouts=lib.Shard(1)),
    }


def block_step(lib: Any, styles: Any, mesh: Any, layers: int) -> Op:
    """Forward and backward of a stack of blocks on this rank's part of a sequence."""
    torch.manual_seed(0)
    net = nn.Sequential(*(Block(16, 4) for _ in range(layers)))
    for block in net:
        styles.parallelize_module(block, mesh, block_plan(lib, styles), src_data_rank=None)
    x = torch.randn(1, 4, 16, requires_grad=True)

    def step() -> None:
        net.zero_grad()
        x.grad = None
        net(x).sum().backward()

    return step


def plain_step(layers: int) -> Op:
    """The local arithmetic alone: what both libraries' figures contain of it."""
    torch.manual_seed(0)
    net = nn.Sequential(*(Block(16, 4) for _ in range(layers)))
    x = torch.randn(1, 4, 16, requires_grad=True)

    def step() -> None:
        net.zero_grad()
        x.grad = None
        net(x).sum().backward()

    return step


def time_all(ops: list[Op], calls: int, rounds: int) -> list[float]:
    """Microseconds a call of each, the best of `rounds` alternating rounds."""
    best = [math.inf] * len(ops)
    for fn in ops:
        for _ in range(3):
            fn()
    for _ in range(rounds):
        for which, fn in enumerate(ops):
            start = time.perf_counter()
            for _ in range(calls):
                fn()
            best[which] = min(best[which], (time.perf_counter() - start) / calls)
    return [seconds * 1e6 for seconds in best]


class CountTraffic(TorchDispatchMode):
    """Collectives and the bytes one rank sends in them, by one formula for whoever issues them."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks
        self.collectives: Counter[str] = Counter()
        self.sent_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind in (longmesh.DTensor, reference.DTensor) for kind in types):
            return NotImplemented  # the DTensor first: then its local ops come here
        name, n = func._schema.name.removeprefix("_c10d_functional::"), self.ranks
        shares = {
            "all_gather_into_tensor": n - 1,
            "reduce_scatter_tensor": (n - 1) / n,
            "all_to_all_single": (n - 1) / n,
            "all_reduce": 2 * (n - 1) / n,
        }
        if name in shares:
            self.collectives[name] += 1
            self.sent_bytes += int(args[0].numel() * args[0].element_size() * shares[name])
        return func(*args, **(kwargs or {}))


def count(step: Op) -> tuple[dict[str, int], int]:
    step()
    with CountTraffic(dist.get_world_size()) as traffic:
        step()
    return dict(traffic.collectives), traffic.sent_bytes


def measure_real(layers: int, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    mesh = cpu_mesh(dist.get_world_size())
    steps = [block_step(*library, mesh, layers) for library in LIBRARIES]
    return {"times": time_all(steps, 5, rounds), "traffic": [count(step) for step in steps]}


def measure_host(ranks: int, layers: int, rounds: int) -> list[float]:
    """In a world of `ranks` of which only this process exists, and in which nothing is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    mesh = init_device_mesh("cpu", (ranks,))
    return time_all([*(block_step(*lib, mesh, layers) for lib in LIBRARIES), plain_step(layers)], 10, rounds)


def measure_overlap(rows: int, rounds: int) -> list[float]:
    """A gathered product with and without overlap, forward: `rows` in all, 512 features."""
    torch.set_num_threads(1)
    mesh = cpu_mesh(dist.get_world_size())
    x = torch.randn(rows // dist.get_world_size(), 512)
    ops: list[Op] = []
    for overlap in (True, False):
        style = longmesh.parallel.ColwiseParallel(input_layouts=longmesh.Shard(0), overlap=overlap)
        linear = longmesh.parallel.parallelize_module(nn.Linear(512, 1024), mesh, style, src_data_rank=None)
        ops.append(torch.no_grad()(lambda linear=linear: linear(x)))
    return time_all(ops, 3, rounds)


def show(host: list[float], real: dict[str, Any], overlap: list[float], ranks: int, layers: int) -> None:
    table = Table(
        "", "longmesh", "torch", "ratio", title=f"{layers} blocks, forward + backward, {ranks} ranks"
    )

    def times(name: str, ours: float, theirs: float) -> None:
        table.add_row(name, f"{ours:.0f} us", f"{theirs:.0f} us", f"{ours / theirs:.3f}")

    ours, theirs, plain = host
    times("host, nothing sent", ours, theirs)
    times("  without the plain modules' time", ours - plain, theirs - plain)
    times("real ranks over gloo", *real["times"])
    (mine, my_bytes), (other, other_bytes) = real["traffic"]
    table.add_row(
        "collectives",
        str(sum(mine.values())),
        str(sum(other.values())),
        f"{sum(mine.values()) / sum(other.values()):.3f}",
    )
    table.add_row("bytes a rank sends", str(my_bytes), str(other_bytes), f"{my_bytes / other_bytes:.3f}")
    console = Console(width=110)
    console.print(table)
    console.print(f"longmesh: {mine}\ntorch:    {other}")
    console.print(
        f"gather and product, overlapped {overlap[0]:.0f} us, one after the other {overlap[1]:.0f} us, "
        f"ratio {overlap[0] / overlap[1]:.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--rows", type=int, default=2048)
    options = parser.parse_args()
    with RankPool(options.ranks) as pool:
        real = pool.run(measure_real, options.layers, options.repeat, ranks=options.ranks, timeout=600.0)[0]
        overlap = pool.run(measure_overlap, options.rows, options.repeat, ranks=options.ranks, timeout=600.0)[
            0
        ]
    with RankPool(1) as pool:
        host = pool.run(measure_host, options.ranks, options.layers, options.repeat, ranks=1, timeout=600.0)[
            0
        ]
    show(host, real, overlap, options.ranks, options.layers)


if __name__ == "__main__":
    main()
