"""What a step sends, and how long that takes, from its value alone. Pure: with no process.

`places` are the rank's coordinates on the meshes of a plan, with the cluster that each is planned for.
"""

from __future__ import annotations

import math
from typing import Any

from longmesh.comm.halo import is_local
from longmesh.comm.sent import halo_rows, interval_rows, redistribute_bytes
from longmesh.plan import RedistributePlan, plan_redistribute
from longmesh.rules.steps import Exchange, Execute, Gather, Halo, Redistribute, Step
from longmesh.spec import Coordinate
from longmesh.tensor.executors import executor_of

Sent = list[tuple[tuple[int, ...], int]]


class OwnStep(Step):
    """A step of another room, which says itself how it runs and what it sends."""

    __slots__ = ()

    def bind(self, comms: Any) -> Any:
        """What runs it: a function of a frame."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it does")

    def sent(self, where: Coordinate) -> Sent:
        """The axes over which it sends, and the bytes that the rank at `where` does."""
        return []


def route_of(step: Redistribute, places: Any) -> RedistributePlan:
    """How a redistribution goes."""
    shape = [int(size) for size in step.shape]
    how = {"itemsize": step.dtype.itemsize, "cluster": places[step.mesh].cluster}
    return plan_redistribute(step.have, step.want, shape=shape, **how)


def sent_by(step: Any, places: Any) -> Sent:
    """The axes of each collective of a step, and the bytes that this rank sends in it."""
    kind = type(step)
    if kind is Redistribute:
        return redistribute_bytes(route_of(step, places), step.dtype, places[step.mesh].coordinate)
    if kind is Exchange:
        return [(step.axes, interval_rows(step.have, step.want, _rank(step, places)) * step.row_bytes)]
    if kind is Gather:
        return [(step.axes, step.num_bytes * (_size(step, places) - 1))]
    if kind is Halo:
        rows = halo_rows(step.have, step.need, _rank(step, places), home=step.home)
        return [(step.axes, rows * step.row_bytes)]
    if kind is Execute and step.axes:
        place = places[step.mesh]
        return [(step.axes, executor_of(step.name).sent_bytes(step, place.mesh, place.coordinate))]
    return step.sent(places[0].coordinate) if isinstance(step, OwnStep) else []


def is_collective(step: Any, places: Any) -> bool:
    """Whether some rank sends something in a step. The same on every rank."""
    kind = type(step)
    if kind is Redistribute:
        return route_of(step, places).num_collectives > 0
    if kind is Exchange:
        return any(interval_rows(step.have, step.want, rank) for rank in range(len(step.have)))
    if kind is Gather:
        return step.num_bytes > 0
    if kind is Halo:
        return not is_local(step.have, step.need)
    if kind is Execute:
        return bool(step.axes) and _size(step, places) > 1
    return isinstance(step, OwnStep) and places[0].mesh.num_ranks > 1


def time_us(step: Step, places: Any) -> float:
    """The predicted time of a step's collectives: its busiest rank receives as much as this one sends, or more."""
    if isinstance(step, Redistribute):
        return route_of(step, places).cost_us
    if not is_collective(step, places):
        return 0.0
    place = places[getattr(step, "mesh", 0)]
    kind = "all_gather" if isinstance(step, Gather) else "all_to_all"
    return sum(
        place.cluster.collective_us(kind, place.mesh.sizes, axes, _most(step, axes, count, place))
        for axes, count in sent_by(step, places)
    )


def _most(step: Any, axes: tuple[int, ...], count: int, place: Any) -> int:
    """What the busiest rank sends."""
    if not isinstance(step, (Exchange, Halo)):
        return count
    size = math.prod(place.mesh.sizes[axis] for axis in axes)
    if isinstance(step, Exchange):
        rows = max(interval_rows(step.have, step.want, rank) for rank in range(size))
    else:
        rows = max(halo_rows(step.have, step.need, rank, home=step.home) for rank in range(size))
    return rows * step.row_bytes


def _rank(step: Any, places: Any) -> int:
    place = places[step.mesh]
    return place.mesh.members(step.axes, place.coordinate).index(place.coordinate)


def _size(step: Any, places: Any) -> int:
    return math.prod(places[step.mesh].mesh.sizes[axis] for axis in step.axes)
