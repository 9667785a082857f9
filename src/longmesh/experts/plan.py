"""DispatchPlan: which rank sends how many tokens to which expert, as a value.

            expert   0   1   2   3   4
    rank 0           3   0   9   1   2        rank 0 holds experts 0 and 1, rank 1 experts 2 and 3, rank 2 expert 4
    rank 1           4   4   0   0   7
    rank 2           0   0   0   0   0        no token: it sends nothing and still runs its expert

The ranks exchange these counts first. From them every rank knows all sends, receives and bytes of the layer,
forward and backward; so does a planner that was given counts, or a balanced guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longmesh.errors import LongmeshError
from longmesh.plan import Cluster
from longmesh.spec import Layout, MeshShape, Shard

Interval = tuple[int, int]
Counts = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class DispatchPlan:
    """`counts[i, e]`: how many tokens rank i sends to expert e. `held[i]`: the experts of rank i, start and length.

    >>> plan = plan_dispatch([[3, 0, 1], [0, 2, 2]], mesh_sizes=(2,), row_bytes=8)
    >>> plan.held, plan.sent_rows(0), plan.received_rows(0), plan.bytes_sent(0)
    (((0, 2), (2, 1)), (3, 1), (3, 2), 24)
    """

    counts: Counts
    held: tuple[Interval, ...]
    row_bytes: int
    mesh_sizes: tuple[int, ...]
    axes: tuple[str, ...]

    @property
    def num_experts(self) -> int:
        """How many experts there are on all ranks."""
        return self.counts.shape[1]

    def sent_rows(self, rank: int) -> tuple[int, ...]:
        """How many tokens `rank` sends to each rank, itself included."""
        row = self.counts[rank]
        return tuple(int(row[start : start + length].sum()) for start, length in self.held)

    def received_rows(self, rank: int) -> tuple[int, ...]:
        """How many tokens `rank` receives from each rank, itself included."""
        start, length = self.held[rank]
        return tuple(int(n) for n in self.counts[:, start : start + length].sum(1))

    def rows_of_experts(self, rank: int) -> tuple[int, ...]:
        """How many tokens each expert of `rank` gets."""
        start, length = self.held[rank]
        return tuple(int(n) for n in self.counts[:, start : start + length].sum(0))

    def bytes_sent(self, rank: int, *, backward: bool = False) -> int:
        """Bytes of tokens and results that `rank` sends to others. The backward pass sends as many.

        With the counts, which are exchanged once: `count_bytes`.
        """
        away = sum(self.sent_rows(rank)) - self.sent_rows(rank)[rank]
        back = sum(self.received_rows(rank)) - self.received_rows(rank)[rank]
        return (away + back) * self.row_bytes

    @property
    def count_bytes(self) -> int:
        """Bytes of counts that every rank sends, once per forward pass."""
        return (self.num_experts + 1) * 8 * (len(self.held) - 1)

    def bytes_by_axis(self) -> dict[tuple[str, ...], int]:
        """Bytes that all ranks send in one forward and backward pass, by the mesh axes of the group."""
        ranks = range(len(self.held))
        return {self.axes: sum(2 * self.bytes_sent(rank) + self.count_bytes for rank in ranks)}

    def predicted_us(self, cluster: Cluster) -> float:
        """Time of the forward pass's exchanges: the counts, the tokens, and the results."""
        everything = tuple(range(len(self.mesh_sizes)))
        busiest = max(sum(self.received_rows(r)) - self.received_rows(r)[r] for r in range(len(self.held)))
        back = max(sum(self.sent_rows(r)) - self.sent_rows(r)[r] for r in range(len(self.held)))
        counts = cluster.collective_us("all_gather", self.mesh_sizes, everything, self.count_bytes)
        return counts + sum(
            cluster.collective_us("all_to_all", self.mesh_sizes, everything, rows * self.row_bytes)
            for rows in (busiest, back)
        )

    def explain(self) -> str:
        """A line per rank: its experts, the tokens it has, computes and sends, and its bytes."""
        lines = ["rank  experts    tokens here  rows computed  rows sent  rows received  bytes sent forward"]
        for rank, (start, length) in enumerate(self.held):
            sent, received = self.sent_rows(rank), self.received_rows(rank)
            experts = f"{start}:{start + length}" if length else "none"
            lines.append(
                f"{rank:4d}  {experts:<9s}  {sum(sent):11d}  {sum(received):13d}  {sum(sent) - sent[rank]:9d}  "
                f"{sum(received) - received[rank]:13d}  {self.bytes_sent(rank):18d}"
            )
        rows = [sum(self.received_rows(rank)) for rank in range(len(self.held))]
        mean = sum(rows) / len(rows)
        lines.append(
            f"busiest rank: {max(rows) / mean:.2f} of the mean" if mean else "no token has an expert"
        )
        return "\n".join(lines)


def plan_dispatch(
    counts: Sequence[Sequence[int]] | Counts,
    *,
    mesh_sizes: Sequence[int],
    row_bytes: int,
    axes: Sequence[str] = (),
    order: Sequence[tuple[int, ...]] | None = None,
) -> DispatchPlan:
    """The plan for `counts[rank][expert]` tokens of `row_bytes` each. Local: communicates nothing.

    `order`: the coordinates of the ranks of `counts`, in their order; by default the mesh's own.

    >>> print(plan_dispatch([[1, 1], [4, 0]], mesh_sizes=(2,), row_bytes=4).explain().splitlines()[-1])
    busiest rank: 1.67 of the mean
    """
    table: Any = np.asarray(counts, dtype=np.int64)
    shape = MeshShape(tuple(mesh_sizes))
    places = list(shape.coordinates()) if order is None else list(order)
    if table.ndim != 2 or len(table) != len(places):
        raise LongmeshError(
            f"plan_dispatch: counts of shape {table.shape} for a mesh of {tuple(mesh_sizes)}; give a row per rank "
            "with a number per expert"
        )
    held = experts_of(shape, table.shape[1], places)
    return DispatchPlan(table, held, row_bytes, tuple(mesh_sizes), tuple(axes))


def experts_of(shape: MeshShape, num_experts: int, places: Sequence[tuple[int, ...]]) -> tuple[Interval, ...]:
    """The experts that each of these ranks holds: as a dim that all axes shard."""
    layout = Layout(shape, [Shard(0)] * shape.ndim)
    found = (layout.interval(0, num_experts, place) for place in places)
    return tuple((int(start), int(length)) for start, length in found)
