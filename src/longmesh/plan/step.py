"""Steps: one move from a layout to the next, and what it puts on the wire.

    slice           local: keep the part of the shard that the next layout wants
    pad             local: become one of the terms of a pending reduction
    all_gather      every rank of the group gets every rank's shard
    all_to_all      the tensor is sharded along another dim: each rank receives exactly what it lacks
    reduce_scatter  a pending reduction, of which each rank needs a piece
    all_reduce      a pending reduction is carried out everywhere

A step's group is made of `axes`: ranks that differ only there talk to each other, one collective
however many axes. Two layouts determine the step between them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from longmesh.plan.boxes import Shape, overlaps, total_over_ranks, volumes
from longmesh.plan.cluster import Cluster
from longmesh.spec import Layout, MaskPartial, Partial, Placement, Replicate, Shard

StepKind = Literal["slice", "pad", "all_gather", "all_to_all", "reduce_scatter", "all_reduce"]


@dataclass(frozen=True, slots=True)
class Step:
    """One move. `rank_bytes`: the most that one rank receives; `total_bytes`: what all ranks send together."""

    kind: StepKind
    src: Layout
    dst: Layout
    axes: tuple[int, ...]
    rank_bytes: int
    total_bytes: int
    cost_us: float

    @property
    def is_local(self) -> bool:
        return not self.axes


def is_linear(placement: Placement) -> bool:
    """Sums, averages and pending lookups turn into each other by a local factor or mask."""
    return isinstance(placement, Partial) and placement.reduce_op in ("sum", "avg")


def is_same_pending(src: Placement, dst: Placement) -> bool:
    """Whether `src` becomes `dst` with the reduction still pending, by local work at the most."""
    if src == dst:
        return isinstance(src, Partial)
    return is_linear(src) and is_linear(dst) and not isinstance(dst, MaskPartial)


def makes_terms(src: Layout, dst: Layout) -> bool:
    """Whether `dst` has a pending reduction that `src` doesn't have in that form."""
    pairs = zip(src.placements, dst.placements, strict=True)
    return any(isinstance(after, Partial) and before != after for before, after in pairs)


def make_step(src: Layout, dst: Layout, shape: Shape, itemsize: int, cluster: Cluster) -> Step:
    """The step between two neighbouring layouts of a plan: it reduces, makes terms, or moves shards."""
    sizes = src.mesh.sizes
    pairs = list(enumerate(zip(src.placements, dst.placements, strict=True)))
    reduced = [a for a, (p, q) in pairs if isinstance(p, Partial) and not isinstance(q, Partial)]
    if reduced:
        return _reduce(src, dst, shape, itemsize, cluster, reduced)
    if makes_terms(src, dst):
        return Step("pad", src, dst, (), 0, 0, 0.0)
    held = volumes(dst, shape)
    received = held - overlaps(src, dst, shape)
    most = int(received.max())
    if most == 0:
        return Step("slice", src, dst, (), 0, 0, 0.0)
    axes = _moving_axes(src, dst)
    kind: StepKind = "all_gather" if _is_gather(src, dst, axes) else "all_to_all"
    total = total_over_ranks(received, sizes) * itemsize
    took = cluster.collective_us(kind, sizes, axes, most * itemsize)
    return Step(kind, src, dst, axes, most * itemsize, total, took)


def _reduce(
    src: Layout, dst: Layout, shape: Shape, itemsize: int, cluster: Cluster, reduced: list[int]
) -> Step:
    sizes = src.mesh.sizes
    axes = tuple(a for a in reduced if sizes[a] > 1)
    if not axes:
        return Step("slice", src, dst, (), 0, 0, 0.0)
    group = math.prod(sizes[a] for a in axes)
    held = volumes(dst, shape)
    scatters = any(isinstance(dst.placements[a], Shard) for a in reduced)
    if scatters:
        received = held * (group - 1)
    else:
        received = 2 * (-(-held // group)) * (group - 1)
    most = int(received.max()) * itemsize
    kind: StepKind = "reduce_scatter" if scatters else "all_reduce"
    total = total_over_ranks(received, sizes) * itemsize
    return Step(kind, src, dst, axes, most, total, cluster.collective_us(kind, sizes, axes, most))


def _moving_axes(src: Layout, dst: Layout) -> tuple[int, ...]:
    """The axes along which data has to travel: those that shard `src` and shard `dst` in another way.

    An axis that replicates `src` is never among them: each rank asks the holder that shares its own
    coordinate there.
    """
    moving: list[int] = []
    for axis, placement in enumerate(src.placements):
        if isinstance(placement, Shard) and src.mesh.sizes[axis] > 1:
            before, after = src.shard_axes(placement.dim), dst.shard_axes(placement.dim)
            same = dst.placements[axis] == placement and (
                before[: before.index(axis)] == after[: after.index(axis)]
            )
            if not same:
                moving.append(axis)
    return tuple(moving)


def _is_gather(src: Layout, dst: Layout, axes: tuple[int, ...]) -> bool:
    """Whether every rank of the group ends up with everything the group holds."""
    for axis, (before, after) in enumerate(zip(src.placements, dst.placements, strict=True)):
        if axis in axes:
            if not isinstance(after, Replicate):
                return False
        elif before != after:
            return False
    return all(
        tuple(a for a in src.shard_axes(dim) if a not in axes)
        == src.shard_axes(dim)[: len(dst.shard_axes(dim))]
        == dst.shard_axes(dim)
        for dim in src.shard_dims
    )
