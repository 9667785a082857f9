"""Clusters by name: typical figures for people who have not measured theirs. `measured` is False in all of them.

They are good enough to choose between plans that differ much. Times predicted from them are of the right order, no
more: `longmesh doctor --save cluster.json` measures a machine, and `Cluster.load` reads it.
"""

from __future__ import annotations

from dataclasses import replace

from longmesh.errors import LongmeshError
from longmesh.plan.cluster import Cluster, Level, Link
from longmesh.plan.gpus import GPUS, Gpu
from longmesh.plan.rate import Rate

FLOAT8 = "float8_e4m3fn"


def _rates(flops_per_us: float, dtypes: tuple[str, ...], small: float) -> tuple[Rate, ...]:
    """Attention at half of a matrix product's rate, backward at four fifths of that; tiles of 64 at `small` of it."""
    found: list[Rate] = []
    for dtype in dtypes:
        for tile, part in ((64, small), (512, 1.0)):
            found += [
                Rate("matmul", dtype, tile, flops_per_us * part),
                Rate("attention", dtype, tile, flops_per_us * part / 2),
                Rate("attention_backward", dtype, tile, flops_per_us * part * 0.4),
            ]
    return tuple(found)


def _gpu_rates(gpu: Gpu) -> tuple[Rate, ...]:
    """Rates of half precision, and of float8 products; tiles of 64 at a quarter of it."""
    found: list[Rate] = []
    for tile, part in ((64, 0.25), (512, 1.0)):
        for dtype in ("bfloat16", "float16"):
            found += [
                Rate("matmul", dtype, tile, gpu.peak_bf16 * gpu.matmul * part / 1e6),
                Rate("attention", dtype, tile, gpu.attention * part / 1e6),
                Rate("attention_backward", dtype, tile, gpu.attention_backward * part / 1e6),
            ]
        if gpu.peak_float8:
            found.append(Rate("matmul", FLOAT8, tile, gpu.peak_float8 * gpu.float8 * part / 1e6))
    return tuple(found)


def gpu_cluster(gpu: Gpu) -> Cluster:
    """Nodes of 8 GPUs. Of a link's bandwidth collectives reach 80 %; a copy reads and writes."""
    levels = (
        Level("device", 1, Link.of(latency_us=5.0, bytes_per_us=gpu.hbm * gpu.copies / 2 / 1e6)),
        Level("node", 8, Link.of(latency_us=15.0, bytes_per_us=gpu.node * 0.8 / 1e6, peer_us=1.0)),
        Level("pod", None, Link.of(latency_us=30.0, bytes_per_us=gpu.pod * 0.8 / 1e6, peer_us=2.0)),
    )
    return Cluster(gpu.name, levels, _gpu_rates(gpu), call_us=10.0, overlap=0.9)


_cpu_link = Link.of(latency_us=50.0, bytes_per_us=2_000.0, peer_us=20.0)
CLUSTERS: dict[str, Cluster] = {
    "cpu": Cluster(
        "cpu",
        (Level("device", 1, Link.of(latency_us=5.0, bytes_per_us=8_000.0)), Level("node", None, _cpu_link)),
        _rates(100_000.0, ("float32",), 0.8),
        call_us=50.0,
        overlap=0.5,
    ),
    **{name: gpu_cluster(gpu) for name, gpu in GPUS.items()},
}


_ALLOWED = (
    f"use one of {', '.join(CLUSTERS)}, or the file that longmesh doctor --save cluster.json wrote, whose name "
    "ends in .json"
)


def named_cluster(name: str, nodes: int | None = None) -> Cluster:
    """Typical figures: "cpu" (processes of one machine over gloo), or GPUs in nodes of 8 with a fast network between
    them: "a100", "h100", "h200", "b200", "mi300x". With `nodes=1` there is no network: all ranks are in one node.

    >>> print(named_cluster("h100"))
    h100 (typical figures, not measured)
    """
    if name not in CLUSTERS:
        raise LongmeshError(f"cluster={name!r} is not known; {_ALLOWED}")
    if nodes is not None and nodes < 1:
        raise LongmeshError(f"named_cluster({name!r}, nodes={nodes}): give at least 1 node")
    found = CLUSTERS[name]
    if nodes != 1 or len(found.levels) == 2:
        return found
    return replace(found, levels=(found.levels[0], replace(found.levels[1], ranks=None)))


def cluster_of(choice: Cluster | str | None, device: str = "cpu") -> Cluster:
    """The cluster, the one of that name, of that file (a name that ends in .json), or the typical one of a device."""
    if choice is None:
        return CLUSTERS["cpu" if device == "cpu" else "h100"]
    if isinstance(choice, Cluster):
        return choice
    return Cluster.load(choice) if choice.endswith(".json") else named_cluster(choice)


def find_cluster_problem(choice: str) -> str | None:
    """Why a cluster that a command was given can't be used, in words that name no parameter; None if it can."""
    if not choice.endswith(".json"):
        return None if choice in CLUSTERS else f"it is not known; {_ALLOWED}"
    try:
        Cluster.load(choice)
    except LongmeshError as error:
        return str(error)
    return None
