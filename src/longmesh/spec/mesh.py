"""A mesh that is only sizes and names: what layouts and plans need to know of a DeviceMesh.

    MeshShape((2, 4), ("dp", "tp"))      8 ranks, no processes, no devices

Axes are counted from the left, and a rank's coordinate has one index per axis (row-major, as in
torch's DeviceMesh). Equal meshes are one object, so a dict keyed on them hashes by identity.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Protocol

from longmesh.errors import LongmeshError

Coordinate = tuple[int, ...]


class HasMeshShape(Protocol):
    """What `MeshShape.of` reads of torch's DeviceMesh."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None: ...


class MeshShape:
    """Sizes and names of the axes of a mesh. Interned: equal means identical.

    >>> many = MeshShape((512, 8), ("dp", "tp"))
    >>> many, many.num_ranks
    (MeshShape(dp=512, tp=8), 4096)
    >>> MeshShape.of(mesh).sizes
    (2,)
    """

    __slots__ = ("__weakref__", "names", "sizes")

    sizes: tuple[int, ...]
    names: tuple[str, ...] | None

    def __new__(cls, sizes: Sequence[int], names: Sequence[str] | None = None) -> MeshShape:
        return _intern(tuple(sizes), None if names is None else tuple(names))

    @staticmethod
    def of(mesh: MeshShape | HasMeshShape) -> MeshShape:
        """The shape of a DeviceMesh; a MeshShape is returned as it is."""
        if isinstance(mesh, MeshShape):
            return mesh
        return _intern(tuple(mesh.shape), mesh.mesh_dim_names)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.sizes)

    @property
    def num_ranks(self) -> int:
        """The ranks of all axes together."""
        return math.prod(self.sizes)

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes, under the name that torch's mesh gives them."""
        return self.sizes

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """The names, under the name that torch's mesh gives them."""
        return self.names

    def size(self, axis: int | None = None) -> int:
        """The ranks of one axis, or of all."""
        return self.num_ranks if axis is None else self.sizes[axis]

    def axis_name(self, axis: int) -> str:
        """How messages call an axis: by its name, else by its number."""
        return f"axis {axis}" if self.names is None else f"axis '{self.names[axis]}'"

    def coordinates(self) -> Iterator[Coordinate]:
        """Every coordinate, in row-major order."""
        return product(*(range(size) for size in self.sizes))

    def index(self, coordinate: Coordinate) -> int:
        """The row-major position of a coordinate."""
        position = 0
        for size, place in zip(self.sizes, coordinate, strict=True):
            position = position * size + place
        return position

    def members(self, axes: Sequence[int], coordinate: Coordinate) -> tuple[Coordinate, ...]:
        """The coordinates that differ from this one on `axes` only, in row-major order of those."""
        found: list[Coordinate] = []
        for places in product(*(range(self.sizes[axis]) for axis in axes)):
            member = list(coordinate)
            for axis, place in zip(axes, places, strict=True):
                member[axis] = place
            found.append(tuple(member))
        return tuple(found)

    def __repr__(self) -> str:
        if self.names is None:
            return f"MeshShape({self.sizes})"
        return "MeshShape(" + ", ".join(f"{n}={s}" for n, s in zip(self.names, self.sizes, strict=True)) + ")"

    def __copy__(self) -> MeshShape:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> MeshShape:
        return self

    def __reduce__(self) -> tuple[type[MeshShape], tuple[object, ...]]:
        return MeshShape, (self.sizes, self.names)


@functools.cache
def _intern(sizes: tuple[int, ...], names: tuple[str, ...] | None) -> MeshShape:
    if not sizes or any(size < 1 for size in sizes):
        raise LongmeshError(f"a mesh needs at least one axis and one rank on each, got sizes {sizes}")
    if names is not None and len(names) != len(sizes):
        raise LongmeshError(f"a mesh of sizes {sizes} needs {len(sizes)} axis names, got {names}")
    mesh = object.__new__(MeshShape)
    mesh.sizes = sizes
    mesh.names = names
    return mesh
