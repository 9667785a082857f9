"""A step as one rank sees it: which parts of its shard go to whom, and where what arrives belongs.

Everything is a box (one interval per dim). For the member q of our group,

    we send  (what we hold now) & (what q holds next)
    and get  (what q holds now) & (what we hold next)

which covers gathers, all-to-alls, scatters of a reduction and local slices alike. Pure: given
every rank's transfer, a test can carry out a plan in one process.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from longmesh.plan import Step
from longmesh.spec import Coordinate, Layout

Slices = tuple[slice, ...]
Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a local tensor: index with `slices`, reshape to `shape`."""

    slices: Slices
    shape: tuple[int, ...]
    numel: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """One rank's share of a step; `sends` and `receives` have one part per member of the group."""

    sends: tuple[Part, ...]
    receives: tuple[Part, ...]
    out_shape: tuple[int, ...]
    is_uniform: bool
    is_in_order: bool

    @property
    def send_counts(self) -> list[int]:
        return [part.numel for part in self.sends]

    @property
    def receive_counts(self) -> list[int]:
        return [part.numel for part in self.receives]


def make_transfer(
    step: Step, shape: tuple[int, ...], coordinate: Coordinate, members: tuple[Coordinate, ...]
) -> Transfer:
    """What the rank at `coordinate` sends and receives in `step`, its group being `members`."""
    here, next_here = _box(step.src, shape, coordinate), _box(step.dst, shape, coordinate)
    sends = tuple(_part(here, _box(step.dst, shape, q)) for q in members)
    receives = tuple(_part(next_here, _box(step.src, shape, q)) for q in members)
    sizes = [math.prod(stop - start for start, stop in _box(step.src, shape, q)) for q in members]
    return Transfer(
        sends=sends,
        receives=receives,
        out_shape=tuple(stop - start for start, stop in next_here),
        is_uniform=len(frozenset(sizes)) == 1,
        is_in_order=_is_in_order(receives, tuple(stop - start for start, stop in next_here)),
    )


def _box(layout: Layout, shape: tuple[int, ...], coordinate: Coordinate) -> Box:
    box: list[tuple[int, int]] = []
    for dim, size in enumerate(shape):
        start, length = layout.interval(dim, size, coordinate)
        assert isinstance(start, int) and isinstance(length, int), "a transfer needs concrete sizes"
        box.append((start, start + length))
    return tuple(box)


def _part(base: Box, other: Box) -> Part:
    """The common part of two boxes, in the coordinates of the first."""
    slices: list[slice] = []
    lengths: list[int] = []
    for (start, stop), (other_start, other_stop) in zip(base, other, strict=True):
        low = max(start, other_start)
        length = max(0, min(stop, other_stop) - low)
        low = min(low, stop) - start
        slices.append(slice(low, low + length))
        lengths.append(length)
    return Part(tuple(slices), tuple(lengths), math.prod(lengths))


def _is_in_order(receives: tuple[Part, ...], out_shape: tuple[int, ...]) -> bool:
    """Whether the parts, laid one after the other, are the result."""
    row = 0
    for part in receives:
        if part.numel == 0:
            continue
        if part.shape[1:] != out_shape[1:] or (part.slices and part.slices[0].start != row):
            return False
        row += part.shape[0] if part.shape else 1
    return row == (out_shape[0] if out_shape else 1)
