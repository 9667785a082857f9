"""Who holds what: the pieces that a layout splits a tensor into, and the ranks that hold each.

    Shard(0), Replicate() on a 2 x 2 mesh, shape (5, 4)
        dim 0 in [0:3) [3:5)   dim 1 in [0:4)
        ([0:3), [0:4)) -> ranks 0, 1      ([3:5), [0:4)) -> ranks 2, 3

Dims are sharded independently, so the pieces are a grid: every combination of the dims' intervals. Ranks whose
interval is empty on some dim hold nothing and are listed apart. Pure: needs no process group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from longmesh.spec import Coordinate, Layout

Interval = tuple[int, int]
Box = tuple[Interval, ...]


@dataclass(frozen=True, slots=True)
class ShardPiece:
    """A box of the tensor and who holds it: one tuple of ranks per copy, several in it if each has a term."""

    box: Box
    copies: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> str:
        """`0, 2`: copies; `0+1`: terms of a pending reduction."""
        return ", ".join("+".join(map(str, terms)) for terms in self.copies)


@dataclass(frozen=True, slots=True)
class ShardMap:
    """The pieces of a tensor in row-major order of their boxes, and the ranks that hold none."""

    shape: tuple[int, ...]
    layout: Layout
    intervals: tuple[tuple[Interval, ...], ...]
    pieces: tuple[ShardPiece, ...]
    empty_ranks: tuple[int, ...]

    @property
    def summary(self) -> tuple[str, ...]:
        """What holds for the whole tensor, in a few lines."""
        lines = [f"shape {self.shape}, {self.layout} on {self.layout.mesh}"]
        pending = [self.layout.mesh.axis_name(a) for a in self.layout.partial_axes]
        if pending:
            lines.append(f"a+b: terms of a reduction that is pending on {', '.join(pending)}")
        if self.empty_ranks:
            lines.append("hold nothing: rank " + ", ".join(map(str, self.empty_ranks)))
        return tuple(lines)


@dataclass(frozen=True, slots=True)
class Panel:
    """Two dims of the tensor as rows and columns, the other sharded dims fixed as `title` says.

    `row_dim` or `col_dim` is None where the tensor has no such dim to show: one row or one column then.
    """

    title: str
    row_dim: int | None
    col_dim: int | None
    rows: tuple[Interval, ...]
    cols: tuple[Interval, ...]
    cells: tuple[tuple[int, ...], ...]  # per row, the index into `pieces` of each column


def shard_map(layout: Layout, shape: Sequence[int], ranks: Sequence[int]) -> ShardMap:
    """The map of a tensor of `shape`; `ranks` are the mesh's global ranks in row-major order."""
    sizes = tuple(int(size) for size in shape)
    layout.check_ndim(len(sizes), sizes)
    holders: dict[Box, dict[Coordinate, list[int]]] = {}
    empty: list[int] = []
    pending = layout.partial_axes
    for coordinate, rank in zip(layout.mesh.coordinates(), ranks, strict=True):
        box = _box(layout, sizes, coordinate)
        if any(start == stop for start, stop in box):
            empty.append(rank)
            continue
        copy = tuple(0 if axis in pending else place for axis, place in enumerate(coordinate))
        holders.setdefault(box, {}).setdefault(copy, []).append(rank)
    intervals = tuple(tuple(sorted({box[dim] for box in holders})) for dim in range(len(sizes)))
    pieces = tuple(
        ShardPiece(box, tuple(tuple(terms) for terms in holders[box].values()))
        for box in product(*intervals)
        if holders
    )
    return ShardMap(sizes, layout, intervals, pieces, tuple(empty))


def panels(shards: ShardMap) -> list[Panel]:
    """The tensor as grids of two dims: its last two, or of more dims the last two that are sharded."""
    if not shards.pieces:
        return []
    ndim = len(shards.shape)
    shown = list(range(ndim)) if ndim <= 2 else [d for d in range(ndim) if len(shards.intervals[d]) > 1][-2:]
    row_dim = shown[-2] if len(shown) == 2 else None
    col_dim = shown[-1] if shown else None
    fixed = [d for d in range(ndim) if d not in (row_dim, col_dim)]
    index = {piece.box: number for number, piece in enumerate(shards.pieces)}
    rows = shards.intervals[row_dim] if row_dim is not None else ((0, 1),)
    cols = shards.intervals[col_dim] if col_dim is not None else ((0, 1),)
    result: list[Panel] = []
    for chosen in product(*(shards.intervals[d] for d in fixed)):
        at = dict(zip(fixed, chosen, strict=True))

        def cell(row: Interval, col: Interval, at: dict[int, Interval] = at) -> int:
            box = {
                **at,
                **({} if row_dim is None else {row_dim: row}),
                **({} if col_dim is None else {col_dim: col}),
            }
            return index[tuple(box[d] for d in range(ndim))]

        title = ", ".join(f"dim {d} {span(i)}" for d, i in at.items())
        cells = tuple(tuple(cell(row, col) for col in cols) for row in rows)
        result.append(Panel(title, row_dim, col_dim, rows, cols, cells))
    return result


def span(interval: Interval) -> str:
    """`[0:3)`"""
    return f"[{interval[0]}:{interval[1]})"


def _box(layout: Layout, shape: tuple[int, ...], coordinate: Coordinate) -> Box:
    box: list[Interval] = []
    for dim, size in enumerate(shape):
        start, length = layout.interval(dim, size, coordinate)
        assert isinstance(start, int) and isinstance(length, int), "sizes are concrete here"
        box.append((start, start + length))
    return tuple(box)
