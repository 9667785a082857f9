"""The cheapest way from one layout to another.

A plan passes through at most five layouts:

    src -> sliced -> reduced -> moved -> dst
        local     one collective  one    local (terms of a new pending reduction)

Moving shards takes one collective whatever the two layouts are, and each rank receives exactly
what it lacks, which no other plan can beat. So the search is only over where a pending reduction
leaves its pieces: on which dims it scatters, and whether replicated axes are sliced first to make
it smaller. Where axes differ in cost, each collective over several axes is also tried one axis
at a time, cheap axes first or last (inside a host, then between hosts).

Pure and deterministic: every rank finds the same plan from the same arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from longmesh.errors import LongmeshError
from longmesh.plan.boxes import Shape
from longmesh.plan.cluster import Cluster
from longmesh.plan.named_clusters import cluster_of
from longmesh.plan.step import Step, is_same_pending, make_step, makes_terms
from longmesh.spec import Layout, MaskPartial, Partial, Placement, Replicate, Shard

Path = tuple[Layout, ...]
_DEFAULT = cluster_of(None)


@dataclass(frozen=True, slots=True)
class RedistributePlan:
    """The steps from `src` to `dst` for a tensor of `shape`; `explain()` puts them in words.

    >>> four = MeshShape((4,))
    >>> plan = plan_redistribute(Layout(four, [Shard(0)]), Layout(four, [Shard(1)]), shape=(1024, 1024))
    >>> plan.num_collectives, plan.rank_bytes
    (1, 786432)
    >>> print(plan.explain())
    S(0) -> S(1) on MeshShape((4,)), shape (1024, 1024), 4 bytes per element
      1. all_to_all     S(0) -> S(1), over axis 0 (4), each rank sends 768.0 KiB
         each rank receives exactly what it lacks; nothing is gathered and dropped
      1 collective; each rank sends 768.0 KiB on average, the busiest receives 768.0 KiB; predicted 483 us
    """

    src: Layout
    dst: Layout
    shape: Shape
    itemsize: int
    steps: tuple[Step, ...]

    @property
    def rank_bytes(self) -> int:
        """The most that one rank receives, over all steps."""
        return sum(step.rank_bytes for step in self.steps)

    @property
    def total_bytes(self) -> int:
        """What all ranks send together."""
        return sum(step.total_bytes for step in self.steps)

    @property
    def cost_us(self) -> float:
        """The predicted time."""
        return sum(step.cost_us for step in self.steps)

    @property
    def num_collectives(self) -> int:
        """The steps that communicate."""
        return sum(not step.is_local for step in self.steps)

    def explain(self) -> str:
        """The plan in words: each step with its bytes and its reason."""
        from longmesh.plan.render import explain_plan

        return explain_plan(self)


def plan_redistribute(
    src: Layout,
    dst: Layout,
    *,
    shape: Sequence[int],
    itemsize: int = 4,
    cluster: Cluster | str | None = None,
) -> RedistributePlan:
    """The cheapest plan from `src` to `dst` on a `cluster` (or one of that name). Pure; sends nothing. Cached on
    every argument.

    >>> grid = MeshShape((2, 2), ("dp", "tp"))
    >>> start, end = Layout(grid, [Partial(), Replicate()]), Layout(grid, [Shard(0), Shard(1)])
    >>> [step.kind for step in plan_redistribute(start, end, shape=(1024, 1024)).steps]
    ['slice', 'reduce_scatter']
    """
    return _plan(src, dst, tuple(shape), itemsize, _DEFAULT if cluster is None else cluster_of(cluster))


@functools.lru_cache(maxsize=16384)
def _plan(src: Layout, dst: Layout, shape: Shape, itemsize: int, cluster: Cluster) -> RedistributePlan:
    _check(src, dst, shape)
    best: tuple[Step, ...] = ()
    best_cost = (float("inf"), 0)
    seen: list[Path] = []
    for path in _paths(src, dst, shape, cluster):
        if path in seen:
            continue
        seen.append(path)
        steps: list[Step] = []
        cost = 0.0
        for here, there in pairwise(path):
            step = make_step(here, there, shape, itemsize, cluster)
            steps.append(step)
            cost += step.cost_us
            if (cost, len(steps)) >= best_cost:
                break
        else:
            best, best_cost = tuple(steps), (cost, len(steps))
    return RedistributePlan(src, dst, shape, itemsize, best)


def _check(src: Layout, dst: Layout, shape: Shape) -> None:
    if src.mesh is not dst.mesh:
        raise LongmeshError(
            f"can't redistribute from {src.mesh} to {dst.mesh}: both layouts must be on one mesh; "
            "go through full_tensor() and distribute_tensor() to change meshes"
        )
    src.check_ndim(len(shape), shape)
    dst.check_ndim(len(shape), shape)
    for axis, (before, after) in enumerate(zip(src.placements, dst.placements, strict=True)):
        if isinstance(after, MaskPartial) and before != after:
            raise LongmeshError(
                f"can't redistribute {src.mesh.axis_name(axis)} from {before!r} to MaskPartial(): only a lookup "
                "makes it; ask for Partial() instead"
            )


def _paths(src: Layout, dst: Layout, shape: Shape, cluster: Cluster) -> Iterator[Path]:
    """Every sequence of layouts worth costing, the plainest first."""
    for sliced, reduced in _reductions(src, dst, shape):
        for moved in _targets(reduced, dst):
            yield from _unfused((src, sliced, reduced, moved, dst), cluster)


def _reductions(src: Layout, dst: Layout, shape: Shape) -> Iterator[tuple[Layout, Layout]]:
    """Where the pending reductions that must be carried out may leave their pieces."""
    pairs = list(zip(src.placements, dst.placements, strict=True))
    pending = [a for a, (p, q) in enumerate(pairs) if isinstance(p, Partial) and not is_same_pending(p, q)]
    if not pending:
        yield src, src
        return
    free = [a for a, (p, q) in enumerate(pairs) if p == Replicate() and not isinstance(q, Partial)]
    free = [a for a in free if src.mesh.sizes[a] > 1]
    dims = _useful_dims(src, dst, shape)
    unsliced: list[Placement] = [Replicate()]
    shards: list[Placement] = [Shard(d) for d in dims]
    for slices in product(*(unsliced + shards for _ in free)):
        sliced = _append(src, dict(zip(free, slices, strict=True)), dst)
        yield sliced, _append(sliced, dict.fromkeys(pending, Replicate()), dst)
        for scatters in product(*(shards for _ in pending)):
            yield sliced, _append(sliced, dict(zip(pending, scatters, strict=True)), dst)


def _useful_dims(src: Layout, dst: Layout, shape: Shape) -> list[int]:
    """The dims that either layout shards, and the longest one."""
    if not shape:
        return []
    longest = max(range(len(shape)), key=lambda d: (shape[d], -d))
    return sorted({*src.shard_dims, *dst.shard_dims, longest})


def _append(layout: Layout, placements: dict[int, Placement], dst: Layout) -> Layout:
    """Change the given axes; new shards go innermost, among themselves in `dst`'s order."""

    def place(axis: int) -> tuple[int, int]:
        placement = placements[axis]
        order = dst.shard_axes(placement.dim) if isinstance(placement, Shard) else ()
        return (order.index(axis) if axis in order else len(order), axis)

    for axis in sorted(placements, key=place):
        layout = layout.with_placement(axis, placements[axis])
    return layout


def _targets(reduced: Layout, dst: Layout) -> Iterator[Layout]:
    """Layouts from which `dst` is one local step away: its new pending terms not yet made.

    An axis that shards the tensor now may go on sharding it and pad its piece with the identity of the
    reduction, or be gathered first.
    """
    created = [
        a
        for a, (p, q) in enumerate(zip(reduced.placements, dst.placements, strict=True))
        if isinstance(q, Partial) and not is_same_pending(p, q)
    ]
    still_pending = {
        a: reduced.placements[a]
        for a in dst.partial_axes
        if a not in created and dst.placements[a] != reduced.placements[a]
    }
    options: list[list[Placement]] = [
        [p, Replicate()] if isinstance(p := reduced.placements[a], Shard) else [Replicate()] for a in created
    ]
    for choice in product(*options):
        yield _append(dst, {**still_pending, **dict(zip(created, choice, strict=True))}, reduced)


def _unfused(path: Path, cluster: Cluster) -> Iterator[Path]:
    """The path itself and, where axes differ in cost, with its collectives taken one axis at a time."""
    path = _without_repeats(path)
    yield path
    if not cluster.is_uniform:
        yield from _split(path[:1], path[1:], cluster)


def _split(done: Path, rest: Path, cluster: Cluster) -> Iterator[Path]:
    if len(rest) == 0:
        yield _without_repeats(done)
        return
    yield from _split((*done, rest[0]), rest[1:], cluster)
    for path in _one_axis_at_a_time(done[-1], rest[0], cluster):
        # Cuts may come out in another order than the waypoint's. That does where shards move next; terms
        # are made only from the waypoint itself, and the last layout is given.
        free = len(rest) > 1 and not makes_terms(rest[0], rest[1])
        tail = path if free else (*path, rest[0])
        yield from _split((*done, *tail), rest[1:], cluster)


def _one_axis_at_a_time(here: Layout, there: Layout, cluster: Cluster) -> Iterator[Path]:
    """Cheap axes first (right for reductions, which shrink the data), or last (right for gathers)."""
    changed = [a for a, (p, q) in enumerate(zip(here.placements, there.placements, strict=True)) if p != q]
    if len(changed) < 2:
        return
    sizes = here.mesh.sizes
    cheap_first = sorted(
        changed, key=lambda a: (cluster.collective_us("all_gather", sizes, (a,), 1 << 20), a)
    )
    for order in (cheap_first, cheap_first[::-1]):
        path = [here]
        for axis in order:
            path.append(_append(path[-1], {axis: there.placements[axis]}, there))
        yield tuple(path[1:])


def _without_repeats(path: Path) -> Path:
    first, *_ = path
    return (first, *(there for here, there in pairwise(path) if there is not here))
