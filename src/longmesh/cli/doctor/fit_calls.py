"""What a call of attention costs beside its kernels and links: a few calls, measured as they are.

    measured - predicted  =  passes * pass_us  +  transfers * peers * transfer_us       for each call, as near as can be

Ranks wait for each other in a call, and where they share cores one that has got its keys waits for a core as well. No
part that is measured by itself shows that. The calls are short: in a long one an error of the rates would count as the
transfers'.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from longmesh.attention import masks
from longmesh.attention.engine.context_parallel import ContextParallel
from longmesh.attention.mask.base import Mask
from longmesh.attention.plan.attention_plan import AttentionPlan
from longmesh.attention.plan.predict import predict
from longmesh.cli.doctor.measure_links import Clock, Make, Run
from longmesh.plan.cluster import Cluster

FITTED = ("pass_us", "transfer_us")
SIZES = (1.0, 2.5)  # tokens of a rank, in tiles
MANY = 32  # ranks
MASKS: dict[str, Callable[[int], Mask]] = {
    "full": lambda n: masks.full(),
    "causal": lambda n: masks.causal(),
    "window": lambda n: masks.sliding_window(max(1, n // 6)),
}
ONE_AXIS = (
    *((exchange, "contiguous", "full") for exchange in ("allgather", "ring", "ulysses")),
    *((exchange, "zigzag", "causal") for exchange in ("sparse", "allgather", "ring")),
    *((exchange, "contiguous", "window") for exchange in ("sparse", "ulysses")),
)
TWO_AXES = tuple(("hybrid", layout, mask) for mask in MASKS for layout in ("contiguous", "zigzag"))


class Reference(NamedTuple):
    """A call to measure."""

    length: int
    exchange: str
    layout: str
    mask: str


def reference_calls(mesh_sizes: Sequence[int], tile: int, heads: int) -> list[Reference]:
    """Calls of every exchange that the mesh has. On many ranks they are no longer than on MANY."""
    n = math.prod(mesh_sizes)
    if n == 1 or len(mesh_sizes) > 2:
        return []
    kinds = ONE_AXIS if len(mesh_sizes) == 1 else TWO_AXES
    if mesh_sizes[-1] > heads:  # there are fewer heads than ranks to split them over
        kinds = tuple(kind for kind in kinds if kind[0] not in ("ulysses", "hybrid"))
    return [Reference(int(size * tile) * min(n, MANY), *kind) for size in SIZES for kind in kinds]


def fit_calls(
    mesh: DeviceMesh, clock: Clock, cluster: Cluster, tile: int, heads: int, head_dim: int, dtype: torch.dtype
) -> Cluster:
    """The cluster with the figures that calls show. Collective: every rank gets the same."""
    calls = reference_calls(tuple(mesh.shape), tile, heads)
    if not calls:
        return cluster
    cluster = replace(cluster, **dict.fromkeys(FITTED, 0.0))
    engines: list[ContextParallel] = []
    for call in calls:
        how: dict[str, Any] = {"exchange": call.exchange, "layout": call.layout}
        how |= {"mask": MASKS[call.mask](call.length), "cluster": cluster, "check": False}
        how |= {"num_heads": heads, "head_dim": head_dim, "dtype": dtype}
        engines.append(ContextParallel(mesh, seq_len=call.length, **how))
    took = clock.best_us([_maker(cp, heads, head_dim, dtype, clock.device) for cp in engines])
    found = fit([cp.plan for cp in engines], took)
    return replace(cluster, **dict(zip(FITTED, found, strict=True)))


def _maker(cp: ContextParallel, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Make:
    def make() -> Run:
        q, k, v, dout = (
            torch.randn(1, heads, cp.num_tokens, head_dim, device=device).to(dtype) for _ in range(4)
        )
        leaves = [t.requires_grad_() for t in (q, k, v)]

        def run() -> tuple[Tensor, ...]:
            return torch.autograd.grad(cp(*leaves), leaves, dout)

        return run

    return make


def fit(plans: Sequence[AttentionPlan], took_us: Sequence[float]) -> list[float]:
    """The figures, none below 0, with which the plans' predictions are off by the least share of what they took."""
    took = np.array(took_us)
    rows: list[list[float]] = []
    rest: list[float] = []
    for plan in plans:
        base = predict(plan).total_us
        each = [
            predict(replace(plan, cluster=replace(plan.cluster, **{name: 1.0}))).total_us for name in FITTED
        ]
        rows.append([us - base for us in each])  # how often it counts
        rest.append(base)
    weights = 1 / took
    return least_squares(np.array(rows) * weights[:, None], (took - np.array(rest)) * weights)


def least_squares(a: np.ndarray, b: np.ndarray) -> list[float]:
    """x of at least 0 with the least |a x - b|, for a few unknowns: each in turn, until none changes."""
    squares, product = a.T @ a, a.T @ b
    x = np.zeros(a.shape[1])
    for _ in range(1000):
        before = x.copy()
        for i in range(len(x)):
            if squares[i, i] > 0:
                x[i] = max(0.0, x[i] + (product[i] - squares[i] @ x) / squares[i, i])
        if np.abs(x - before).max() <= 1e-9 * (1 + np.abs(x).max()):
            break
    return x.tolist()
