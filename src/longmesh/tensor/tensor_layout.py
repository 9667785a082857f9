"""TensorLayout: mesh, layout, global shape, stride and dtype of a tensor, as one interned object.

Every DTensor points to one, and an op's cache key is made of them: comparing and hashing by identity is what
makes looking up an op's plan cheap. Sizes that are symbolic don't hash; such a `TensorLayout` is not shared, and
what depends on it is not cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from longmesh._torch import write_count
from longmesh.comm import MeshComm, Place
from longmesh.plan import Cluster, RedistributePlan, plan_redistribute
from longmesh.spec import Coordinate, Layout, MaskPartial, MeshShape, Placement


class MeshRank:
    """A rank of a mesh that need not exist: what a MeshComm is to plans, where there is no process."""

    is_member = True

    def __init__(self, shape: MeshShape, coordinate: Coordinate, cluster: Cluster) -> None:
        self.shape = self.mesh = shape
        self.coordinate, self.cluster = coordinate, cluster
        self.layouts: dict[tuple[Any, ...], Any] = {}
        self.kinds: dict[tuple[Any, ...], Any] = {}

    @property
    def place(self) -> Place:
        return Place(self.shape, self.coordinate, self.cluster)


class Reduced(NamedTuple):
    """The local part of a pending tensor's value once reduced, and the tensor's version then."""

    local: torch.Tensor
    version: int


def version_of(tensor: Any) -> int:
    """How many writes to a DTensor and its views there were; in inference mode, where torch counts none, those to any
    tensor of the mesh. The same on every rank."""
    return tensor._tensor_layout.comm.num_writes if tensor.is_inference() else write_count(tensor)


class Kind:
    """What all tensor layouts have in common that differ in sizes alone, beyond whether a size is 0, 1 or larger."""

    __slots__ = ("has_lookup", "recipes", "tensor_class")

    def __init__(self, layout: Layout, ndim: int) -> None:
        self.recipes: dict[tuple[Any, ...], Any] = {}
        # As rows of a matrix the parts of such a tensor would not be in one piece.
        is_sharded_inside = any(0 < dim < ndim - 1 for dim in layout.shard_dims)
        self.tensor_class = TensorLayout.classes[is_sharded_inside]
        self.has_lookup = MaskPartial in map(type, layout.placements)


class TensorLayout:
    """How a tensor is laid out. Interned unless `is_symbolic`: equal means identical."""

    __slots__ = (
        "comm",
        "dtype",
        "has_lookup",
        "is_copied_view",
        "is_expanded",
        "is_symbolic",
        "kind",
        "layout",
        "mesh",
        "plans",
        "reduced",
        "routes",
        "shape",
        "stride",
        "tensor_class",
        "tensor_meta",
        "views",
    )

    # The classes of tensors: DTensor, and the one of tensors that are sharded between their first and last dim.
    classes: ClassVar[tuple[type, type]]

    # Of a plan that no process makes: a MeshRank, with a MeshShape for a mesh.
    comm: Any
    mesh: Any
    layout: Layout
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_symbolic: bool
    # Whether several elements are one place in memory: it has a dim that was expanded.
    is_expanded: bool
    kind: Kind
    # Plans to other layouts, once made.
    routes: dict[Layout, RedistributePlan]
    # Plans of ops whose first DTensor is laid out so (dispatch.py).
    plans: dict[tuple[Any, ...], Any]
    # The sizes as which it was viewed: they keep its layout (view_check.py).
    views: set[tuple[int, ...]]
    # Of a tensor with a pending reduction that remembers its reduced value: the layout of that.
    reduced: Layout | None
    # Whether the tensor is a view that had to be copied: ops on it go through its base (view_origin.py).
    is_copied_view: bool
    # Whether it is a pending lookup, whose mask is not applied yet.
    has_lookup: bool
    # The class of tensors that are laid out so, and where torch finds shape and stride: here.
    tensor_class: type
    tensor_meta: TensorLayout

    # What programs written for torch read of `x._spec`.

    @property
    def placements(self) -> tuple[Placement, ...]:
        return self.layout.placements

    @property
    def device_mesh(self) -> Any:
        return self.mesh

    def __deepcopy__(self, memo: dict[int, object]) -> TensorLayout:
        return self

    def with_layout(self, layout: Layout) -> TensorLayout:
        return tensor_layout(self.comm, layout, self.shape, self.stride, self.dtype)

    def remembering(self, reduced: Layout | None) -> TensorLayout:
        """The same for a tensor that remembers its reduced value, laid out so."""
        return tensor_layout(
            self.comm, self.layout, self.shape, self.stride, self.dtype, reduced, self.is_copied_view
        )

    def as_copied_view(self, is_copied: bool) -> TensorLayout:
        """The same for a view that had to be copied, or for what it shows."""
        return tensor_layout(
            self.comm, self.layout, self.shape, self.stride, self.dtype, self.reduced, is_copied
        )

    def route(self, layout: Layout) -> RedistributePlan:
        """The plan from here to `layout`. For concrete sizes: a compiler specialises here."""
        plan = self.routes.get(layout)
        if plan is None:
            shape = [int(size) for size in self.shape]
            how = {"itemsize": self.dtype.itemsize, "cluster": self.comm.cluster}
            plan = plan_redistribute(self.layout, layout, shape=shape, **how)
            if not self.is_symbolic:
                self.routes[layout] = plan
        return plan


# More layouts of one mesh than this are no working set.
_MAX_LAYOUTS = 1 << 13


def tensor_layout(
    comm: MeshComm | MeshRank,
    layout: Layout,
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    reduced: Layout | None = None,
    is_copied_view: bool = False,
) -> TensorLayout:
    """The one TensorLayout of these, found in the mesh: it lives as long as the mesh, or as tensors that have it."""
    key = (layout, shape, stride, dtype, reduced, is_copied_view)
    try:
        found = comm.layouts.get(key)
    except TypeError:
        if type(shape) is list or type(stride) is list:
            return tensor_layout(comm, layout, tuple(shape), tuple(stride), dtype, reduced, is_copied_view)
        return _make(comm, key, is_symbolic=True)
    if found is None:
        if len(comm.layouts) >= _MAX_LAYOUTS:  # sizes that never come back; those in use are made again
            comm.layouts.clear()
            comm.kinds.clear()
        found = comm.layouts[key] = _make(comm, key, is_symbolic=False)
    return found


def _make(comm: MeshComm | MeshRank, key: tuple[Any, ...], *, is_symbolic: bool) -> TensorLayout:
    own = object.__new__(TensorLayout)
    own.mesh, own.comm = comm.mesh, comm
    own.layout, own.shape, own.stride, own.dtype, own.reduced, own.is_copied_view = key
    own.is_symbolic = is_symbolic
    own.is_expanded = (
        not is_symbolic
        and 0 in own.stride
        and any(step == 0 and size > 1 for size, step in zip(own.shape, own.stride, strict=True))
    )
    own.routes = {}
    own.plans = {}
    own.views = set()
    own.tensor_meta = own
    kind = own.kind = Kind(own.layout, len(own.shape)) if is_symbolic else _kind(own)
    own.tensor_class, own.has_lookup = kind.tensor_class, kind.has_lookup
    return own


def _kind(own: TensorLayout) -> Kind:
    sizes = tuple([n if n < 2 else 2 for n in own.shape])
    key = (own.layout, own.dtype, own.reduced, own.is_copied_view, own.is_expanded, sizes)
    kind = own.comm.kinds.get(key)
    if kind is None:
        kind = own.comm.kinds[key] = Kind(own.layout, len(sizes))
    return kind
