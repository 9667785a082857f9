"""Layout: how the ranks of a mesh hold a tensor, whatever its sizes.

A layout is a mesh shape, one placement per axis, and a shard order. It is interned (equal means
identical, hashed by identity) and holds no tensor sizes, so it keys the per-op caches and is the
context of `__tensor_flatten__`. It prints as one token per axis; a dim that several axes shard is
printed once, with those axes in order, the outermost first: `S(0)[1,0]R` on three axes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from longmesh.errors import LongmeshError
from longmesh.spec.chunking import IntLike, nested_interval
from longmesh.spec.mesh import Coordinate, HasMeshShape, MeshShape
from longmesh.spec.placement import Partial, Placement, Replicate, Shard, check_kinds
from longmesh.spec.shard_order import ShardOrder, ShardOrderEntry, default_shard_order, make_shard_order


class Layout:
    """Mesh shape + placements + shard order. Interned: equal means identical.

    >>> layout = Layout(MeshShape((2, 2), ("dp", "tp")), [Shard(0), Partial()])
    >>> str(layout), layout.local_shape((5, 4), (1, 0))
    ('S(0)P', (2, 4))
    >>> layout is Layout(MeshShape((2, 2), ("dp", "tp")), [Shard(0), Partial()])
    True
    """

    __slots__ = (
        "__weakref__",
        "_shard_axes",
        "is_replicated",
        "mesh",
        "partial_axes",
        "placements",
        "shard_dims",
        "shard_order",
    )

    mesh: MeshShape
    placements: tuple[Placement, ...]
    shard_order: ShardOrder
    shard_dims: tuple[int, ...]  # the tensor dims that some axis shards, sorted
    partial_axes: tuple[int, ...]  # the axes on which a reduction is pending
    is_replicated: bool  # on every axis
    _shard_axes: dict[int, tuple[int, ...]]

    def __new__(
        cls,
        mesh: MeshShape | HasMeshShape,
        placements: Sequence[Placement],
        shard_order: Iterable[ShardOrderEntry | tuple[int, Sequence[int]]] | None = None,
    ) -> Layout:
        placements = tuple(placements)
        check_kinds(placements)
        return _intern(MeshShape.of(mesh), placements, make_shard_order(placements, shard_order))

    @staticmethod
    def replicated(mesh: MeshShape | HasMeshShape) -> Layout:
        """The layout in which every rank holds everything."""
        shape = MeshShape.of(mesh)
        return Layout(shape, (Replicate(),) * shape.ndim)

    # -- what it says ------------------------------------------------------------------------

    def shard_axes(self, dim: int) -> tuple[int, ...]:
        """The axes that shard tensor dim `dim`, the outermost first."""
        return self._shard_axes.get(dim, ())

    @property
    def num_shards(self) -> int:
        """Into how many pieces the tensor is split."""
        return _product(self.mesh.sizes[a] for axes in self._shard_axes.values() for a in axes)

    @property
    def is_default_order(self) -> bool:
        """Whether axes shard every dim from left to right."""
        return self.shard_order == default_shard_order(self.placements)

    # -- where a rank's piece lies -------------------------------------------------------------

    def interval(self, dim: int, size: IntLike, coordinate: Coordinate) -> tuple[IntLike, IntLike]:
        """Start and length, along `dim` of global length `size`, of what `coordinate` holds."""
        sizes = self.mesh.sizes
        return nested_interval(size, [(sizes[a], coordinate[a]) for a in self.shard_axes(dim)])

    def local_shape(self, shape: Sequence[IntLike], coordinate: Coordinate) -> tuple[IntLike, ...]:
        """The shape of what the rank at `coordinate` holds of a tensor of `shape`."""
        return tuple(
            self.interval(dim, size, coordinate)[1] if dim in self._shard_axes else size
            for dim, size in enumerate(shape)
        )

    def local_offset(self, shape: Sequence[IntLike], coordinate: Coordinate) -> tuple[IntLike, ...]:
        """Where in the global tensor that begins."""
        return tuple(
            self.interval(dim, size, coordinate)[0] if dim in self._shard_axes else 0
            for dim, size in enumerate(shape)
        )

    # -- other layouts -------------------------------------------------------------------------

    def with_placement(self, axis: int, placement: Placement) -> Layout:
        """The layout with one axis changed; an axis that starts to shard a dim does so innermost."""
        placements = (*self.placements[:axis], placement, *self.placements[axis + 1 :])
        axes_of = {dim: [a for a in axes if a != axis] for dim, axes in self.shard_order}
        if isinstance(placement, Shard):
            axes_of.setdefault(placement.dim, []).append(axis)
        return Layout(self.mesh, placements, [(dim, axes) for dim, axes in axes_of.items() if axes])

    def with_replicated(self, axes: Iterable[int]) -> Layout:
        """The layout with some axes replicated."""
        layout = self
        for axis in axes:
            layout = layout.with_placement(axis, Replicate())
        return layout

    def check_ndim(self, ndim: int, shape: Sequence[IntLike] | None = None) -> None:
        """Raise if a placement shards a dim that a tensor of `ndim` dims doesn't have."""
        for dim, axes in self._shard_axes.items():
            if dim >= ndim:
                of = f"shape {tuple(shape)}" if shape is not None else f"{ndim} dims"
                raise LongmeshError(
                    f"Shard({dim}) on {self.mesh.axis_name(axes[0])} is out of range for a tensor of {of}; "
                    + (f"allowed are dims 0 to {ndim - 1}" if ndim else "a scalar can't be sharded")
                )

    def __repr__(self) -> str:
        return f"Layout({self} on {self.mesh})"

    def __str__(self) -> str:
        parts: list[str] = []
        for axis, placement in enumerate(self.placements):
            if not isinstance(placement, Shard):
                parts.append(str(placement))
                continue
            axes = self._shard_axes[placement.dim]
            if len(axes) == 1:
                parts.append(str(placement))
            elif axis == min(axes):
                parts.append(f"{placement}[{','.join(map(str, axes))}]")
        return "".join(parts)

    def __copy__(self) -> Layout:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Layout:
        return self

    def __reduce__(self) -> tuple[type[Layout], tuple[object, ...]]:
        return Layout, (self.mesh, self.placements, self.shard_order)


def _product(values: Iterable[int]) -> int:
    result = 1
    for value in values:
        result *= value
    return result


@functools.cache
def _intern(mesh: MeshShape, placements: tuple[Placement, ...], order: ShardOrder) -> Layout:
    _check(mesh, placements)
    layout = object.__new__(Layout)
    layout.mesh = mesh
    layout.placements = placements
    layout.shard_order = order
    layout.shard_dims = tuple(dim for dim, _ in order)
    layout.partial_axes = tuple(a for a, p in enumerate(placements) if isinstance(p, Partial))
    layout.is_replicated = all(isinstance(p, Replicate) for p in placements)
    layout._shard_axes = dict(order)  # pyright: ignore[reportPrivateUsage]
    return layout


def _check(mesh: MeshShape, placements: tuple[Placement, ...]) -> None:
    if len(placements) != mesh.ndim:
        raise LongmeshError(
            f"{len(placements)} placements {placements} for a mesh of {mesh.ndim} axes {mesh.sizes}; "
            "give one placement per mesh axis"
        )
    ops: list[str] = []
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard) and placement.dim < 0:
            raise LongmeshError(
                f"Shard({placement.dim}) on {mesh.axis_name(axis)}: a layout does not know how many dims the "
                "tensor has; give a dim of 0 or more (DTensorSpec with a tensor_meta takes it as it is)"
            )
        if isinstance(placement, Partial) and placement.reduce_op not in ops:
            ops.append(placement.reduce_op)
    if len(ops) > 1 and sorted(ops) != ["avg", "sum"]:
        raise LongmeshError(
            f"placements {placements} mix pending reductions {' and '.join(ops)}, whose result depends on the "
            "order they run in; reduce one of them first (only sum and avg may be pending together)"
        )
