"""Choose how an op runs: from the layouts its inputs have, the layouts it wants and gives.

A rule's lines hold on one mesh axis. Here they are combined over the axes: every tensor splits its
dims by the axes in one common order, one tensor's pending reductions must go together, and lines that
need equal pieces get them. Of the valid combinations the one whose inputs are cheapest to
redistribute wins; where no input has to be, nothing is searched.

Pure: every rank makes the same choice from the same call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from longmesh.errors import LongmeshError
from longmesh.plan import Cluster, plan_redistribute
from longmesh.rules.rule import AxisRule, OpCall
from longmesh.spec import Layout, MeshShape, Partial, Placement, Replicate, Shard

_MAX_COMBINATIONS = 256


@dataclass(frozen=True, slots=True)
class Choice:
    """The layouts an op takes and gives, and the line chosen on each axis."""

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    lines: tuple[AxisRule, ...]


def choose(
    call: OpCall,
    lines: Sequence[AxisRule],
    layouts: tuple[Layout, ...],
    cluster: Cluster,
    pinned: int | None = None,
) -> Choice | None:
    """The combination of `lines` over the mesh axes that is valid and cheapest on `cluster`, for inputs laid out as
    `layouts`.

    With `pinned`, that input must stay where it is and output 0 must come out there (an in-place op);
    None if no combination does that.
    """
    mesh = layouts[0].mesh
    replicated = AxisRule((Replicate(),) * len(call.tensors), (Replicate(),) * len(call.outputs))
    lines = [*lines, replicated]
    orders = _axis_orders(layouts)
    ready = _ready_lines(lines, layouts)
    if ready is not None:
        choice = _combine(call, ready, mesh, orders[0])
        if (
            choice is not None
            and choice.inputs == layouts
            and (pinned is None or choice.outputs[0] is layouts[pinned])
        ):
            return choice
    best: Choice | None = None
    best_cost = (math.inf, 0)
    costs = _MoveCosts(call, cluster)
    for combination in _combinations(lines, layouts, costs):
        for order in orders:
            choice = _combine(call, combination, mesh, order)
            if choice is None or (pinned is not None and not _stays(choice, layouts, pinned)):
                continue
            moves = [
                i
                for i, (have, want) in enumerate(zip(layouts, choice.inputs, strict=True))
                if have is not want
            ]
            cost = (sum(costs.of(i, layouts[i], choice.inputs[i]) for i in moves), len(moves))
            if cost < best_cost:
                best, best_cost = choice, cost
    return best


def _stays(choice: Choice, layouts: tuple[Layout, ...], pinned: int) -> bool:
    return choice.inputs[pinned] is layouts[pinned] and choice.outputs[0] is layouts[pinned]


def _ready_lines(lines: Sequence[AxisRule], layouts: tuple[Layout, ...]) -> tuple[AxisRule, ...] | None:
    """For each axis the line that takes the inputs as they are laid out, if each axis has one."""
    by_inputs: dict[tuple[Placement, ...], AxisRule] = {}
    for entry in lines:
        by_inputs.setdefault(entry.inputs, entry)
    found: list[AxisRule] = []
    for current in zip(*(layout.placements for layout in layouts), strict=True):
        entry = by_inputs.get(current)
        if entry is None:
            return None
        found.append(entry)
    return tuple(found)


def _axis_orders(layouts: tuple[Layout, ...]) -> list[tuple[int, ...]]:
    """Orders in which the axes may shard: those that an input has now, else left to right."""
    default = tuple(range(layouts[0].mesh.ndim))
    orders: list[tuple[int, ...]] = []
    for layout in layouts:
        if not layout.is_default_order:
            before = {
                a: {
                    b
                    for e in layout.shard_order
                    if a in e.mesh_dims
                    for b in e.mesh_dims[: e.mesh_dims.index(a)]
                }
                for a in default
            }
            order: list[int] = []
            while len(order) < len(default):
                order.append(next(a for a in default if a not in order and before[a] <= set(order)))
            if tuple(order) not in orders:
                orders.append(tuple(order))
    return [*orders, default] if default not in orders else orders


def _combinations(
    lines: Sequence[AxisRule], layouts: tuple[Layout, ...], costs: _MoveCosts
) -> Iterator[tuple[AxisRule, ...]]:
    """Lines per axis; where all combinations are too many, each axis keeps those that are cheapest by themselves."""
    mesh = layouts[0].mesh
    per_axis: list[Sequence[AxisRule]] = [lines] * mesh.ndim
    if len(lines) ** mesh.ndim > _MAX_COMBINATIONS:
        keep = max(2, int(_MAX_COMBINATIONS ** (1 / mesh.ndim)))
        per_axis = [_cheapest_alone(lines, layouts, axis, keep, costs) for axis in range(mesh.ndim)]
    return product(*per_axis)


def _cheapest_alone(
    lines: Sequence[AxisRule], layouts: tuple[Layout, ...], axis: int, keep: int, costs: _MoveCosts
) -> list[AxisRule]:
    def cost(entry: AxisRule) -> float:
        total = 0.0
        for i, (layout, want) in enumerate(zip(layouts, entry.inputs, strict=True)):
            if layout.placements[axis] != want:
                try:
                    target = layout.with_placement(axis, want)
                except LongmeshError:
                    return math.inf
                total += costs.of(i, layout, target)
        return total

    ranked = sorted(range(len(lines)), key=lambda i: (cost(lines[i]), i))[:keep]
    return [lines[i] for i in ranked]


def _combine(
    call: OpCall, combination: tuple[AxisRule, ...], mesh: MeshShape, order: tuple[int, ...]
) -> Choice | None:
    """The layouts that the lines of all axes make together, or None if they don't go together."""
    inputs = _layouts([entry.inputs for entry in combination], mesh, order)
    outputs = _layouts([entry.outputs for entry in combination], mesh, order)
    if inputs is None or outputs is None:
        return None
    for entry in combination:
        for which, dim, *unit in entry.even:
            layout = inputs[which] if which >= 0 else outputs[-1 - which]
            size = call.tensors[which].shape[dim] if which >= 0 else call.outputs[-1 - which].shape[dim]
            if size % math.prod((*unit, *(mesh.sizes[a] for a in layout.shard_axes(dim)))):
                return None
    return Choice(inputs, outputs, combination)


def _layouts(
    columns: Sequence[Sequence[Placement]], mesh: MeshShape, order: tuple[int, ...]
) -> tuple[Layout, ...] | None:
    result: list[Layout] = []
    for placements in zip(*columns, strict=True):
        ops = {p.reduce_op for p in placements if isinstance(p, Partial)}
        if len(ops) > 1 and ops != {"sum", "avg"}:
            return None
        axes_of: dict[int, list[int]] = {}
        for axis in order:
            placement = placements[axis]
            if isinstance(placement, Shard):
                axes_of.setdefault(placement.dim, []).append(axis)
        result.append(Layout(mesh, placements, [(d, a) for d, a in axes_of.items() if len(a) > 1]))
    return tuple(result)


class _MoveCosts:
    """What it takes to redistribute the inputs of a call, on a cluster; each way is looked at once."""

    def __init__(self, call: OpCall, cluster: Cluster) -> None:
        self._call, self._cluster = call, cluster
        self._known: dict[tuple[int, Layout], float] = {}

    def of(self, index: int, have: Layout, want: Layout) -> float:
        """That of input number `index`, which has the layout `have`."""
        found = self._known.get((index, want))
        if found is None:
            found = self._known[index, want] = self._find(index, have, want)
        return found

    def _find(self, index: int, have: Layout, want: Layout) -> float:
        cost = self._planned_us(index, have, want)
        for before, after in zip(have.placements, want.placements, strict=True):
            if not isinstance(after, Partial):
                continue
            turned = isinstance(before, Partial) and before.reduce_op != after.reduce_op
            if turned or isinstance(before, Shard):
                # Padding a shard into a pending sum is free now and an all_reduce of the whole later. A pending
                # average, or a sum turned into one, is rounded once more than what it costs as much to gather.
                cost += self._planned_us(index, have, Layout.replicated(have.mesh)) + 1.0
        return cost

    def _planned_us(self, index: int, have: Layout, want: Layout) -> float:
        meta = self._call.tensors[index]
        how = {"itemsize": meta.dtype.itemsize, "cluster": self._cluster}
        return plan_redistribute(have, want, shape=meta.shape, **how).cost_us
