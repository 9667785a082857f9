"""DTensorSpec: a layout together with its mesh and the global tensor's metadata."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from longmesh.errors import LongmeshError
from longmesh.spec.chunking import IntLike
from longmesh.spec.layout import Layout
from longmesh.spec.mesh import Coordinate, HasMeshShape, MeshShape
from longmesh.spec.placement import Partial, Placement, Replicate, Shard, with_positive_dims
from longmesh.spec.shard_order import ShardOrder, ShardOrderEntry


class TensorMeta(NamedTuple):
    """Global shape, stride and dtype of a tensor.

    >>> meta = TensorMeta(torch.Size([5, 4]), (4, 1), torch.float32)
    >>> DTensorSpec(MeshShape((2,)), [Shard(1)], meta).local_shape((0,))
    (5, 2)
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, init=False)
class DTensorSpec:
    """A layout on a mesh (a DeviceMesh, or a MeshShape where no processes are needed) and a tensor's meta.

    Checked when made: the number of placements, the shard order, and, where the meta is known, that every
    sharded dim exists. Hashable while the sizes are ints.

    >>> meta = TensorMeta(torch.Size([5, 4]), (4, 1), torch.float32)
    >>> spec = DTensorSpec(MeshShape((2, 2)), [Shard(0), Replicate()], meta)
    >>> print(spec)
    Spec(S(0)R on (5, 4))
    >>> spec.local_shape((1, 0)), spec.local_offset((1, 0))
    ((2, 4), (3, 0))
    """

    mesh: MeshShape | HasMeshShape
    layout: Layout
    tensor_meta: TensorMeta | None = field(default=None)

    def __init__(
        self,
        mesh: MeshShape | HasMeshShape,
        placements: Sequence[Placement] | Layout,
        tensor_meta: TensorMeta | None = None,
        shard_order: Iterable[ShardOrderEntry | tuple[int, Sequence[int]]] | None = None,
    ) -> None:
        if isinstance(placements, Layout):
            layout = placements
        else:
            if tensor_meta is not None:
                placements = with_positive_dims(placements, len(tensor_meta.shape), "DTensorSpec")
            layout = Layout(mesh, placements, shard_order)
        if tensor_meta is not None:
            layout.check_ndim(len(tensor_meta.shape), tensor_meta.shape)
        object.__setattr__(self, "mesh", mesh)
        object.__setattr__(self, "layout", layout)
        object.__setattr__(self, "tensor_meta", tensor_meta)

    # -- what it says ------------------------------------------------------------------------

    @property
    def device_mesh(self) -> MeshShape | HasMeshShape:
        """The mesh, under the name that torch gives it."""
        return self.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement for each mesh axis."""
        return self.layout.placements

    @property
    def shard_order(self) -> ShardOrder:
        """Which axes shard each dim, the outermost first."""
        return self.layout.shard_order

    @property
    def shape(self) -> torch.Size:
        """The global shape; an error where the meta is not known."""
        return self._meta().shape

    @property
    def stride(self) -> tuple[int, ...]:
        """The global stride; an error where the meta is not known."""
        return self._meta().stride

    @property
    def dtype(self) -> torch.dtype:
        """The dtype; an error where the meta is not known."""
        return self._meta().dtype

    @property
    def ndim(self) -> int:
        """The number of dims; an error where the meta is not known."""
        return len(self._meta().shape)

    @property
    def num_shards(self) -> int:
        """How many different pieces the tensor is split into."""
        return self.layout.num_shards

    @property
    def num_shards_map(self) -> list[int]:
        """For each tensor dim, into how many pieces it is split."""
        sizes = self.layout.mesh.sizes
        counts = [1] * self.ndim
        for dim, axes in self.shard_order:
            for axis in axes:
                counts[dim] *= sizes[axis]
        return counts

    @property
    def dim_map(self) -> list[int]:
        """For each tensor dim the axis that shards it, or -1. A dim sharded over several axes has no such number."""
        result = [-1] * self.ndim
        for dim, axes in self.shard_order:
            if len(axes) > 1:
                raise LongmeshError(
                    f"dim {dim} is sharded over axes {list(axes)} and a dim map holds one axis a dim; "
                    "read shard_order instead"
                )
            result[dim] = next(iter(axes))
        return result

    @property
    def sums(self) -> list[int]:
        """The axes on which a reduction is pending."""
        return list(self.layout.partial_axes)

    def is_replicated(self) -> bool:
        """Whether every rank holds the whole tensor."""
        return self.layout.is_replicated

    def is_sharded(self) -> bool:
        """Whether some axis shards it."""
        return bool(self.layout.shard_dims)

    # -- where a rank's piece lies -------------------------------------------------------------

    def local_shape(self, coordinate: Coordinate) -> tuple[IntLike, ...]:
        """The shape of what the rank at `coordinate` holds."""
        return self.layout.local_shape(self.shape, coordinate)

    def local_offset(self, coordinate: Coordinate) -> tuple[IntLike, ...]:
        """Where in the global tensor that begins."""
        return self.layout.local_offset(self.shape, coordinate)

    # -- other specs ---------------------------------------------------------------------------

    @staticmethod
    def from_dim_map(
        mesh: MeshShape | HasMeshShape,
        dim_map: Sequence[int],
        sums: Sequence[int] = (),
        tensor_meta: TensorMeta | None = None,
    ) -> DTensorSpec:
        """The inverse of `dim_map` and `sums`; a pending axis is a sum."""
        shape = MeshShape.of(mesh)
        placements: list[Placement] = [Replicate()] * shape.ndim
        taken: dict[int, str] = {}
        wanted = [(axis, "pending sum", Partial()) for axis in sums]
        wanted += [(axis, f"dim {dim}", Shard(dim)) for dim, axis in enumerate(dim_map) if axis != -1]
        for axis, use, placement in wanted:
            if not 0 <= axis < shape.ndim:
                raise LongmeshError(f"{use} names axis {axis} of a mesh with {shape.ndim} axes {shape.sizes}")
            if axis in taken:
                raise LongmeshError(
                    f"{shape.axis_name(axis)} is asked to be both {taken[axis]} and {use}; "
                    "an axis has one placement"
                )
            taken[axis] = use
            placements[axis] = placement
        return DTensorSpec(mesh, placements, tensor_meta)

    def shallow_copy_with_tensor_meta(self, tensor_meta: TensorMeta | None) -> DTensorSpec:
        """The same layout on the same mesh with another meta."""
        return DTensorSpec(self.mesh, self.layout, tensor_meta)

    def __str__(self) -> str:
        if self.tensor_meta is None:
            return f"Spec({self.layout})"
        return f"Spec({self.layout} on {tuple(self.tensor_meta.shape)})"

    def _meta(self) -> TensorMeta:
        if self.tensor_meta is None:
            raise LongmeshError("this spec has no tensor_meta, so no shape; make it with tensor_meta=")
        return self.tensor_meta
