"""The cost model of a plan: latency plus bandwidth, per mesh axis.

A collective over several axes at once pays the largest latency and the smallest bandwidth among
them. Bytes are those the busiest rank receives. Local steps cost nothing: they run at memory speed
and every plan has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from longmesh.errors import LongmeshError


@dataclass(frozen=True, slots=True)
class AxisCost:
    """What a collective on an axis costs: `latency_us` to start it and its bytes at `bytes_per_us`.

    >>> between_hosts = AxisCost(latency_us=50.0, bytes_per_us=1000.0)
    >>> CostModel((between_hosts, AxisCost())).collective_us((0,), 20_000)
    70.0
    """

    latency_us: float = 10.0
    bytes_per_us: float = 4000.0

    def __post_init__(self) -> None:
        if self.latency_us < 0 or self.bytes_per_us <= 0:
            raise LongmeshError(
                f"AxisCost(latency_us={self.latency_us}, bytes_per_us={self.bytes_per_us}): "
                "latency must be at least 0 and bandwidth more than 0"
            )


@dataclass(frozen=True, slots=True)
class CostModel:
    """One `AxisCost` for every axis, or one per axis (e.g. a slow axis between hosts).

    >>> slow_first_axis = CostModel((AxisCost(50.0, 100.0), AxisCost()))
    >>> mesh_shape = MeshShape((2, 4), ("host", "gpu"))
    >>> start, end = Layout(mesh_shape, [Shard(0), Shard(0)]), Layout(mesh_shape, [Replicate(), Replicate()])
    >>> plan = plan_redistribute(start, end, shape=(4096, 512), costs=slow_first_axis)
    >>> [(step.kind, step.axes) for step in plan.steps]
    [('all_to_all', (0, 1)), ('all_gather', (1,))]
    """

    axes: AxisCost | tuple[AxisCost, ...] = AxisCost()

    @property
    def is_uniform(self) -> bool:
        """Whether all axes cost the same."""
        return isinstance(self.axes, AxisCost) or len(frozenset(self.axes)) == 1

    def check(self, num_axes: int) -> None:
        """Raise if the costs are those of another number of mesh axes."""
        if isinstance(self.axes, tuple) and len(self.axes) != num_axes:
            raise LongmeshError(
                f"the cost model has {len(self.axes)} axes and the mesh {num_axes}; "
                "give one AxisCost for all, or one per mesh axis"
            )

    def collective_us(self, axes: Sequence[int], num_bytes: float) -> float:
        """Time of one collective over `axes` in which the busiest rank receives `num_bytes`."""
        if isinstance(self.axes, AxisCost):
            return self.axes.latency_us + num_bytes / self.axes.bytes_per_us
        costs = [self.axes[a] for a in axes]
        return max(c.latency_us for c in costs) + num_bytes / min(c.bytes_per_us for c in costs)
