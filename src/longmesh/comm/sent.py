"""What a rank puts on the wire, before it does: exactly the bytes that a recorder sees afterwards. Pure."""

from __future__ import annotations

import math

import torch

from longmesh.comm.collectives import can_reduce, range_split
from longmesh.comm.execute import cached_transfer, wire_op
from longmesh.comm.halo import Rows, is_local
from longmesh.comm.intervals import Interval, Pieces
from longmesh.plan import RedistributePlan, Step
from longmesh.spec import Coordinate

_REDUCED_AS_INTEGERS = (torch.float32, torch.float64)


def redistribute_bytes(
    plan: RedistributePlan, dtype: torch.dtype, where: Coordinate
) -> list[tuple[tuple[int, ...], int]]:
    """The axes of each collective of a redistribution, and what the rank at `where` sends in it."""
    return [
        (step.axes, _elements(step, plan.shape, dtype, where) * dtype.itemsize)
        for step in plan.steps
        if not step.is_local
    ]


def _elements(step: Step, shape: tuple[int, ...], dtype: torch.dtype, where: Coordinate) -> int:
    members = step.src.mesh.members(step.axes, where)
    rank, size = members.index(where), len(members)
    if step.kind == "all_reduce":
        held = math.prod(int(n) for n in step.src.local_shape(shape, where))
        return all_reduce_elements(held, dtype, wire_op(step), rank, size)
    transfer = cached_transfer(step, shape, where, members)
    if step.kind == "all_gather" and transfer.is_uniform:
        return math.prod(int(n) for n in step.src.local_shape(shape, where)) * (size - 1)
    counts = transfer.send_counts
    return sum(counts) - counts[rank]


def all_reduce_elements(numel: int, dtype: torch.dtype, reduce_op: str, rank: int, size: int) -> int:
    """Of an all_reduce of `numel` elements: twice a share for each other rank, or pieces sent there and back."""
    is_ordered = dtype in _REDUCED_AS_INTEGERS and reduce_op in ("min", "max")
    if is_ordered or can_reduce(dtype, reduce_op):
        return 2 * math.ceil(numel / size) * (size - 1)
    mine = len(range_split(numel, size)[rank])
    return numel - mine + mine * (size - 1)


def interval_rows(have: tuple[Pieces, ...], want: tuple[Interval, ...], rank: int) -> int:
    """The rows that member `rank` sends in `exchange_intervals`."""
    return sum(
        max(0, min(start + length, first + count) - max(start, first))
        for member, (first, count) in enumerate(want)
        if member != rank
        for start, length in have[rank]
    )


def halo_rows(have: tuple[Rows, ...], need: tuple[Rows, ...], rank: int, *, home: bool) -> int:
    """The rows that member `rank` sends in `fetch_rows`, or in `return_rows` where they go home."""
    if is_local(have, need):
        return 0
    mine, others = (need[rank], have) if home else (have[rank], need)
    return sum(
        max(0, min(mine[1], high) - max(mine[0], low))
        for member, (low, high) in enumerate(others)
        if member != rank and low < high
    )
