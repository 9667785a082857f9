"""Clusters by name: typical figures for people who have not measured theirs. `measured` is False in all of them.

They are good enough to choose between plans that differ much. Times predicted from them are of the right order, no
more: `longmesh doctor --save cluster.json` measures a machine, and `Cluster.load` reads it.
"""

from __future__ import annotations

from longmesh.errors import LongmeshError
from longmesh.plan.cluster import Cluster, Level, Link
from longmesh.plan.rate import Rate


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


def _gpus(name: str, *, node: float, pod: float, memory: float, flops_per_us: float) -> Cluster:
    """Nodes of 8 GPUs; bandwidths in bytes per microsecond and GPU."""
    levels = (
        Level("device", 1, Link.of(latency_us=5.0, bytes_per_us=memory)),
        Level("node", 8, Link.of(latency_us=15.0, bytes_per_us=node, peer_us=1.0)),
        Level("pod", None, Link.of(latency_us=30.0, bytes_per_us=pod, peer_us=2.0)),
    )
    return Cluster(
        name, levels, _rates(flops_per_us, ("bfloat16", "float16"), 0.25), call_us=10.0, overlap=0.9
    )


_cpu_link = Link.of(latency_us=50.0, bytes_per_us=2_000.0, peer_us=20.0)
CLUSTERS: dict[str, Cluster] = {
    "cpu": Cluster(
        "cpu",
        (Level("device", 1, Link.of(latency_us=5.0, bytes_per_us=8_000.0)), Level("node", None, _cpu_link)),
        _rates(100_000.0, ("float32",), 0.8),
        call_us=50.0,
        overlap=0.5,
    ),
    "a100": _gpus("a100", node=200_000.0, pod=20_000.0, memory=600_000.0, flops_per_us=250_000_000.0),
    "h100": _gpus("h100", node=350_000.0, pod=40_000.0, memory=1_200_000.0, flops_per_us=700_000_000.0),
}


_ALLOWED = (
    f"use one of {', '.join(CLUSTERS)}, or the file that longmesh doctor --save cluster.json wrote, whose name "
    "ends in .json"
)


def named_cluster(name: str) -> Cluster:
    """Typical figures: "cpu" (processes of one machine over gloo), "a100" or "h100" (nodes of 8 with NVLink, a fast
    network between them).

    >>> print(named_cluster("h100"))
    h100 (typical figures, not measured)
    """
    if name not in CLUSTERS:
        raise LongmeshError(f"cluster={name!r} is not known; {_ALLOWED}")
    return CLUSTERS[name]


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
