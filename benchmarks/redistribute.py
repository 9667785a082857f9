"""Bytes, collectives and time of redistributions, relative to torch's DTensor, for all pairs of layouts.

    python benchmarks/redistribute.py            # the byte table (pure), planning time, and time on 4 ranks
    python benchmarks/redistribute.py --bytes    # the byte table alone

Bytes are the sum over all ranks. torch's bytes are computed from the collectives that one rank issues for the same pair
on a fake process group, times the number of ranks, because torch pads all shards to one size. The formulas are:
all_gather n-1 shards, reduce_scatter (n-1)/n of its input, all_reduce twice that, all_to_all (n-1)/n.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as reference
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import longmesh
from longmesh import Layout, MeshShape, Partial, Replicate, Shard, plan_redistribute
from longmesh.plan.search import _plan
from longmesh.testing import RankPool

MESHES = ((4,), (8,), (2, 2), (2, 4), (2, 2, 2))
SHAPES = ((1024, 512), (1021, 515))


class CountBytes(TorchDispatchMode):
    """Counts what a rank receives in the functional collectives it issues."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0.0
        self.collectives = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(args and args[0], torch.Tensor) and type(args[0]) is not torch.Tensor:
            return func(*args, **(kwargs or {}))
        name = str(func).split(".")[1] if "c10d" in str(func) else ""
        if name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single"):
            group = args[-1]
            group = (
                group
                if isinstance(group, dist.ProcessGroup)
                else dist.distributed_c10d._resolve_process_group(group)
            )
            n, elements = group.size(), args[0].numel()
            piece = elements if name == "all_gather_into_tensor" else -(-elements // n)
            self.bytes += piece * (n - 1) * args[0].element_size() * (2 if name == "all_reduce" else 1)
            self.collectives += 1
        return func(*args, **(kwargs or {}))


def placements_of(lib: Any, ndim: int) -> list[tuple[Any, ...]]:
    options = (lib.Replicate(), lib.Shard(0), lib.Shard(1), lib.Partial())
    return list(itertools.product(options, repeat=ndim))


def reference_bytes(mesh: Any, shape: tuple[int, ...], src: Any, dst: Any) -> tuple[float, int] | None:
    """Bytes and collectives of torch's own redistribution on rank 0; None where it refuses."""
    local = list(shape)
    for axis, placement in enumerate(src):
        if placement.is_shard():
            local[placement.dim] = -(-local[placement.dim] // mesh.size(axis))
    stride = (shape[1], 1)
    x = reference.DTensor.from_local(torch.empty(local), mesh, src, shape=torch.Size(shape), stride=stride)
    with CountBytes() as count:
        try:
            x.redistribute(mesh, dst)
        except (RuntimeError, NotImplementedError, AssertionError):
            return None
    return count.bytes, count.collectives


def byte_table(console: Console) -> None:
    table = Table(
        "mesh", "shape", "pairs", "ours MiB", "torch MiB", "ratio", "ours / torch collectives", "fewer", "more",
        "refused",
        title="sent by all ranks together, all pairs of R, S(0), S(1), P",
    )  # fmt: skip
    for sizes in MESHES:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=math.prod(sizes))
        mesh = init_device_mesh("cpu", sizes)
        ranks = mesh.size()
        layouts = [Layout(MeshShape(sizes), p) for p in placements_of(longmesh, len(sizes))]
        theirs_placements = placements_of(reference, len(sizes))
        for shape in SHAPES:
            ours = theirs = 0.0
            fewer = more = refused = pairs = 0
            calls = [0, 0]
            for src, dst in itertools.product(range(4 ** len(sizes)), repeat=2):
                answer = reference_bytes(mesh, shape, theirs_placements[src], theirs_placements[dst])
                if answer is None:
                    refused += 1
                    continue
                plan = plan_redistribute(layouts[src], layouts[dst], shape=shape)
                pairs += 1
                ours += plan.total_bytes
                theirs += answer[0] * ranks
                calls[0] += plan.num_collectives
                calls[1] += answer[1]
                fewer += plan.total_bytes < answer[0] * ranks
                more += plan.total_bytes > answer[0] * ranks
            table.add_row(
                str(sizes), str(shape), str(pairs), f"{ours / 2**20:.0f}", f"{theirs / 2**20:.0f}",
                f"{ours / theirs:.3f}", f"{calls[0]} / {calls[1]}", str(fewer), str(more), str(refused),
            )  # fmt: skip
        dist.destroy_process_group()
    console.print(table)


def planning_table(console: Console) -> None:
    """Cold planning time over all pairs, Partial(max) and shard orders included."""
    table = Table("mesh", "pairs", "median ms", "99% ms", "worst ms", title="planning a pair, cold")
    for sizes in MESHES:
        mesh = MeshShape(sizes)
        found: list[Layout] = []
        for placements in itertools.product(
            (Replicate(), Shard(0), Shard(1), Partial(), Partial("max")), repeat=len(sizes)
        ):
            if {Partial(), Partial("max")} <= set(placements):
                continue
            layout = Layout(mesh, placements)
            found += {layout, Layout(mesh, placements, [(d, a[::-1]) for d, a in layout.shard_order])}
        times: list[float] = []
        for src, dst in itertools.product(found, repeat=2):
            best = math.inf
            for _ in range(2):
                _plan.cache_clear()
                start = time.perf_counter()
                plan_redistribute(src, dst, shape=(1024, 512))
                best = min(best, time.perf_counter() - start)
            times.append(best * 1e3)
        times.sort()
        table.add_row(
            str(sizes),
            str(len(times)),
            f"{statistics.median(times):.2f}",
            f"{times[int(len(times) * 0.99)]:.2f}",
            f"{times[-1]:.2f}",
        )
    console.print(table)


def time_pairs(sizes: tuple[int, ...], shape: tuple[int, ...], rounds: int) -> list[tuple[str, float, float]]:
    """Milliseconds of each pair on real ranks, ours and torch's, timed in turn."""
    mesh = init_device_mesh("cpu", sizes)
    rows: list[tuple[str, float, float]] = []
    choices = range(4 ** len(sizes))
    for src, dst in itertools.product(choices, repeat=2):
        if src == dst:
            continue
        calls = []
        for lib in (longmesh, reference):
            layouts = placements_of(lib, len(sizes))
            x = lib.distribute_tensor(torch.randn(shape), mesh, layouts[src], src_data_rank=None)
            calls.append(lambda x=x, to=layouts[dst]: x.redistribute(mesh, to).to_local() + 0)
        best = [math.inf, math.inf]
        for _ in range(rounds):
            for which, call in enumerate(calls):
                dist.barrier()
                start = time.perf_counter()
                call()
                dist.barrier()
                best[which] = min(best[which], time.perf_counter() - start)
        name = " -> ".join("".join(map(str, placements_of(longmesh, len(sizes))[i])) for i in (src, dst))
        rows.append((name, best[0] * 1e3, best[1] * 1e3))
    return rows


def time_table(console: Console, rounds: int) -> None:
    table = Table(
        "mesh",
        "shape",
        "pairs",
        "ours ms",
        "torch ms",
        "ratio",
        "geometric mean",
        title="all pairs on 4 gloo ranks",
    )
    with RankPool(4) as pool:
        for sizes in ((4,), (2, 2)):
            for shape in ((512, 512), (509, 515)):
                rows = pool.run(time_pairs, sizes, shape, rounds, ranks=4, timeout=900.0)[0]
                ours, theirs = sum(r[1] for r in rows), sum(r[2] for r in rows)
                mean = math.exp(statistics.mean(math.log(r[1] / r[2]) for r in rows))
                table.add_row(
                    str(sizes),
                    str(shape),
                    str(len(rows)),
                    f"{ours:.0f}",
                    f"{theirs:.0f}",
                    f"{ours / theirs:.3f}",
                    f"{mean:.3f}",
                )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bytes", action="store_true", help="only the byte table")
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # torch warns once a pair of what it does not fuse
    console = Console(width=150)
    if not options.bytes:
        time_table(console, options.repeat)
        planning_table(console)
    byte_table(console)


if __name__ == "__main__":
    main()
