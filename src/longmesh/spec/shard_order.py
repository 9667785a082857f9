"""Shard order: which mesh axes shard a tensor dim, and in which order.

On a 2x2 mesh with placements (Shard(0), Shard(0)), 8 rows are on the ranks as

    order (0, 1), the default          order (1, 0)
    rank (0,0) rows 0 1                rank (0,0) rows 0 1
    rank (0,1) rows 2 3                rank (0,1) rows 4 5
    rank (1,0) rows 4 5                rank (1,0) rows 2 3
    rank (1,1) rows 6 7                rank (1,1) rows 6 7

The first axis shards the dim, the next one shards each piece, so every rank holds one interval of the
dim whatever the order. A dim that no axis shards has no entry; entries are sorted by dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from longmesh.errors import LongmeshError
from longmesh.spec.placement import Placement, Shard


class ShardOrderEntry(NamedTuple):
    """Tensor dim `tensor_dim` is sharded over the axes `mesh_dims`, the first one outermost.

    >>> square = MeshShape((2, 2))
    >>> inner_first = Layout(square, [Shard(0), Shard(0)], [ShardOrderEntry(0, (1, 0))])
    >>> [inner_first.local_offset((8,), place) for place in square.coordinates()]
    [(0,), (4,), (2,), (6,)]
    """

    tensor_dim: int
    mesh_dims: tuple[int, ...]


ShardOrder = tuple[ShardOrderEntry, ...]


def default_shard_order(placements: Sequence[Placement]) -> ShardOrder:
    """Axes shard from left to right."""
    axes_of: dict[int, list[int]] = {}
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            axes_of.setdefault(placement.dim, []).append(axis)
    return tuple(ShardOrderEntry(dim, tuple(axes_of[dim])) for dim in sorted(axes_of))


def make_shard_order(
    placements: Sequence[Placement], given: Iterable[ShardOrderEntry | tuple[int, Sequence[int]]] | None
) -> ShardOrder:
    """A full, sorted order from what a user gave: dims that are left out are sharded from left to right."""
    default = default_shard_order(placements)
    if given is None:
        return default
    axes_of = dict(default)
    seen: list[int] = []
    for dim, axes in given:
        axes = tuple(axes)
        if dim in seen:
            raise LongmeshError(f"shard_order names dim {dim} twice; give each dim one entry")
        seen.append(dim)
        if sorted(axes) != list(axes_of.get(dim, ())):
            holders = list(axes_of.get(dim, ())) or "none"
            raise LongmeshError(
                f"shard_order says dim {dim} is sharded over axes {list(axes)}, but the placements "
                f"{tuple(placements)} shard it over axes {holders}; name exactly those, in the order wanted"
            )
        axes_of[dim] = axes
    return tuple(ShardOrderEntry(dim, axes_of[dim]) for dim in sorted(axes_of))
