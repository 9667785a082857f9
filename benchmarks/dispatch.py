"""Host time of ops on DTensors relative to torch's own DTensor, in one process.

    python benchmarks/dispatch.py [--ranks 1 2] [--repeat 7]

Every ratio is our time per call divided by torch's; lower is better. The two run alternately, in short bursts, and the
shortest of many rounds counts, so a busy machine slows down both. One row runs AdamW on plain tensors of the same size,
for comparison. The last row does not use torch's DTensor: it compares a train step under `longmesh.capture` with the
same step written by hand, with plain local tensors and torch.distributed's all_reduce.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as reference
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import longmesh
from longmesh.testing import RankPool

Op = Callable[[], Any]


def time_pair(ours: Op, theirs: Op, calls: int, rounds: int) -> tuple[float, float]:
    """Microseconds a call of each, the best of `rounds` alternating rounds."""
    best = [math.inf, math.inf]
    for fn in (ours, theirs):
        for _ in range(min(calls, 5)):
            fn()
    for _ in range(rounds):
        for which, fn in enumerate((ours, theirs)):
            start = time.perf_counter()
            for _ in range(calls):
                fn()
            best[which] = min(best[which], (time.perf_counter() - start) / calls)
    return best[0] * 1e6, best[1] * 1e6


def warm_ops(lib: Any, mesh: Any) -> dict[str, Op]:
    """The everyday ops on small tensors; `lib` is longmesh or torch.distributed.tensor."""
    x = lib.distribute_tensor(torch.randn(8, 16), mesh, [lib.Shard(0)])
    y = lib.distribute_tensor(torch.randn(8, 16), mesh, [lib.Shard(0)])
    w = lib.distribute_tensor(torch.randn(16, 16), mesh, [lib.Replicate()])
    b = lib.distribute_tensor(torch.randn(16), mesh, [lib.Replicate()])
    local = torch.randn(8, 16)
    return {
        "add": lambda: x + y,
        "mul scalar": lambda: x * 2.0,
        "mm": lambda: x @ w,
        "view": lambda: x.view(8, 4, 4),
        "transpose": lambda: x.transpose(0, 1),
        "softmax": lambda: torch.softmax(x, -1),
        "layer_norm": lambda: nn.functional.layer_norm(x, (16,)),
        "sum": lambda: x.sum(1),
        "slice": lambda: x[:, 2:8],
        "cat": lambda: torch.cat([x, y], 1),
        "linear": lambda: nn.functional.linear(x, w, b),
        "gelu": lambda: nn.functional.gelu(x),
        "detach": lambda: x.detach(),
        "from_local": lambda: lib.DTensor.from_local(local, mesh, [lib.Shard(0)]),
    }


def cold_ops(lib: Any, mesh: Any, start: int) -> Op:
    """A new shape on each call: what planning an op costs."""
    sizes = iter(range(start, 1 << 30, 8))
    shards = [lib.Shard(0)] + [lib.Replicate()] * (mesh.ndim - 1)

    def call() -> None:
        n = next(sizes)
        x = lib.DTensor.from_local(torch.empty(n, 16), mesh, shards)
        torch.softmax(x * 2.0 + x, -1).sum(1)

    return call


def mlp_step(lib: Any, mesh: Any) -> Op:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    styles = {
        "0.weight": [lib.Shard(0)],
        "0.bias": [lib.Shard(0)],
        "2.weight": [lib.Shard(1)],
        "2.bias": [lib.Replicate()],
    }
    for name, parameter in list(net.named_parameters()):
        module, leaf = net.get_submodule(name.split(".")[0]), name.split(".")[1]
        module.register_parameter(
            leaf, nn.Parameter(lib.distribute_tensor(parameter.detach(), mesh, styles[name]))
        )
    x = lib.distribute_tensor(torch.randn(4, 16), mesh, [lib.Replicate()])

    def step() -> None:
        net(x).sum().backward()

    return step


def adamw_step(lib: Any, mesh: Any, foreach: bool) -> Op:
    params = [nn.Parameter(lib.distribute_tensor(torch.randn(8, 8), mesh, [lib.Shard(0)])) for _ in range(20)]
    for p in params:
        p.grad = lib.distribute_tensor(torch.randn(8, 8), mesh, [lib.Shard(0)])
    return torch.optim.AdamW(params, foreach=foreach).step


def plain_adamw_step() -> Op:
    params = [nn.Parameter(torch.randn(8, 8)) for _ in range(20)]
    for p in params:
        p.grad = torch.randn(8, 8)
    return torch.optim.AdamW(params, foreach=True).step


Layers = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
RATE = 1e-3


def make_layers() -> Layers:
    """Weights and biases of an MLP whose features a tensor-parallel axis cuts."""
    torch.manual_seed(0)
    return torch.randn(32, 16), torch.randn(32), torch.randn(16, 32), torch.randn(16)


def captured_step(mesh: Any) -> Op:
    placements = [[longmesh.Shard(0)], [longmesh.Shard(0)], [longmesh.Shard(1)], [longmesh.Replicate()]]
    layers = [
        longmesh.distribute_tensor(layer, mesh, placement).requires_grad_()
        for layer, placement in zip(make_layers(), placements, strict=True)
    ]
    x = longmesh.distribute_tensor(torch.ones(4, 16), mesh, [longmesh.Replicate()])

    @longmesh.capture
    def step(layers: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        w1, b1, w2, b2 = layers
        hidden = nn.functional.gelu(nn.functional.linear(x, w1, b1))
        y = nn.functional.linear(hidden, w2, b2).redistribute(placements=[longmesh.Replicate()])
        loss = y.square().mean()
        grads = torch.autograd.grad(loss, layers)
        with torch.no_grad():
            for layer, grad in zip(layers, grads, strict=True):
                layer.sub_(grad, alpha=RATE)
        return loss.detach()

    return lambda: step(layers, x)


class SumOfRanks(torch.autograd.Function):
    """What ends a row-wise layer: a sum forward, nothing backward."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor) -> torch.Tensor:
        total = part.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def step_by_hand() -> Op:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    w1, b1, w2, b2 = make_layers()
    cut = (w1.chunk(ranks)[rank], b1.chunk(ranks)[rank], w2.chunk(ranks, 1)[rank].contiguous(), b2)
    layers = [layer.clone().requires_grad_() for layer in cut]
    x = torch.ones(4, 16)

    def step() -> torch.Tensor:
        w1, b1, w2, b2 = layers
        hidden = nn.functional.gelu(nn.functional.linear(x, w1, b1))
        loss = (SumOfRanks.apply(nn.functional.linear(hidden, w2)) + b2).square().mean()
        grads = torch.autograd.grad(loss, layers)
        with torch.no_grad():
            for layer, grad in zip(layers, grads, strict=True):
                layer.sub_(grad, alpha=RATE)
        return loss.detach()

    return step


def measure(rounds: int) -> dict[str, tuple[float, float]]:
    """Every row of the table, on this rank's world."""
    torch.set_num_threads(1)
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    rows: dict[str, tuple[float, float]] = {}
    with torch.no_grad():
        mine, theirs = warm_ops(longmesh, mesh), warm_ops(reference, mesh)
        for name in mine:
            rows[name] = time_pair(mine[name], theirs[name], 20, 40 * rounds)
        rows["cold, 1-D mesh"] = time_pair(cold_ops(longmesh, mesh, 8), cold_ops(reference, mesh, 8), 2, 15)
        cube = init_device_mesh("cpu", (1, 1, world))
        rows["cold, 3-D mesh"] = time_pair(cold_ops(longmesh, cube, 8), cold_ops(reference, cube, 8), 2, 6)
    rows["MLP forward + backward"] = time_pair(
        mlp_step(longmesh, mesh), mlp_step(reference, mesh), 2, 20 * rounds
    )
    for foreach in (True, False):
        name = f"AdamW, 20 parameters, foreach={foreach}"
        rows[name] = time_pair(
            adamw_step(longmesh, mesh, foreach), adamw_step(reference, mesh, foreach), 1, 10 * rounds
        )
    rows["AdamW on plain tensors, foreach=True"] = time_pair(
        plain_adamw_step(), adamw_step(reference, mesh, True), 1, 10 * rounds
    )
    rows["captured train step, against by hand"] = time_pair(
        captured_step(mesh), step_by_hand(), 2, 20 * rounds
    )
    return rows


def show(rows: dict[str, tuple[float, float]], ranks: int) -> None:
    table = Table("", "longmesh us", "torch us", "ratio", title=f"{ranks} rank(s)")
    for name, (ours, theirs) in rows.items():
        table.add_row(name, f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs:.3f}")
    warm = [ours / theirs for ours, theirs in list(rows.values())[:14]]
    table.add_row("warm ops, geometric mean", "", "", f"{math.exp(sum(map(math.log, warm)) / len(warm)):.3f}")
    Console(width=100).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeat", type=int, default=7)
    options = parser.parse_args()
    with RankPool(max(options.ranks)) as pool:
        for ranks in options.ranks:
            show(pool.run(measure, options.repeat, ranks=ranks, timeout=600.0)[0], ranks)


if __name__ == "__main__":
    main()
