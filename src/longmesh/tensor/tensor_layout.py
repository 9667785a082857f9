"""TensorLayout: mesh, layout, global shape, stride and dtype of a tensor, as one interned object.

Every DTensor points to one, and an op's cache key is made of them: comparing and hashing by identity is what
makes looking up an op's plan cheap. Sizes that are symbolic don't hash; such a `TensorLayout` is not shared, and
what depends on it is not cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from longmesh.comm import MeshComm, comm_anywhere
from longmesh.plan import RedistributePlan, plan_redistribute
from longmesh.spec import Layout, MaskPartial


class Kind:
    """What all tensor layouts have in common that differ in sizes alone, beyond whether a size is 0, 1 or larger."""

    __slots__ = ("recipes",)

    def __init__(self) -> None:
        self.recipes: dict[tuple[Any, ...], Any] = {}


class TensorLayout:
    """How a tensor is laid out. Interned unless `is_symbolic`: equal means identical."""

    __slots__ = (
        "comm",
        "dtype",
        "has_lookup",
        "is_copied_view",
        "is_expanded",
        "is_sharded_inside",
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

    # The classes of tensors: DTensor, and the one of tensors that are sharded inside (dtensor.py).
    classes: ClassVar[tuple[type, type]]

    comm: MeshComm
    mesh: DeviceMesh
    layout: Layout
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_symbolic: bool
    # Whether a dim between the first and the last is sharded: as rows of a matrix the parts would not be in one piece.
    is_sharded_inside: bool
    # Whether several elements are one place in memory: it has a dim that was expanded.
    is_expanded: bool
    kind: Kind
    # Plans to other layouts, once made.
    routes: dict[Layout, RedistributePlan]
    # Plans of ops whose first DTensor is laid out so (dispatch.py).
    plans: dict[tuple[Any, ...], Any]
    # The sizes as which it was viewed: they keep its layout (view_route.py).
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

    def __deepcopy__(self, memo: dict[int, object]) -> TensorLayout:
        return self

    def with_layout(self, layout: Layout) -> TensorLayout:
        return tensor_layout(self.mesh, layout, self.shape, self.stride, self.dtype)

    def remembering(self, reduced: Layout | None) -> TensorLayout:
        """The same for a tensor that remembers its reduced value, laid out so."""
        return tensor_layout(
            self.mesh, self.layout, self.shape, self.stride, self.dtype, reduced, self.is_copied_view
        )

    def as_copied_view(self, is_copied: bool) -> TensorLayout:
        """The same for a view that had to be copied, or for what it shows."""
        return tensor_layout(
            self.mesh, self.layout, self.shape, self.stride, self.dtype, self.reduced, is_copied
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
    mesh: DeviceMesh,
    layout: Layout,
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    reduced: Layout | None = None,
    is_copied_view: bool = False,
) -> TensorLayout:
    """The one TensorLayout of these, found in the mesh: it lives as long as the mesh, or as tensors that have it."""
    comm = comm_anywhere(mesh)
    key = (layout, shape, stride, dtype, reduced, is_copied_view)
    try:
        found = comm.layouts.get(key)
    except TypeError:
        if type(shape) is list or type(stride) is list:
            return tensor_layout(mesh, layout, tuple(shape), tuple(stride), dtype, reduced, is_copied_view)
        return _make(comm, key, is_symbolic=True)
    if found is None:
        if len(comm.layouts) >= _MAX_LAYOUTS:  # sizes that never come back; those in use are made again
            comm.layouts.clear()
            comm.kinds.clear()
        found = comm.layouts[key] = _make(comm, key, is_symbolic=False)
    return found


def _make(comm: MeshComm, key: tuple[Any, ...], *, is_symbolic: bool) -> TensorLayout:
    held = object.__new__(TensorLayout)
    held.mesh, held.comm = comm.mesh, comm
    held.layout, held.shape, held.stride, held.dtype, held.reduced, held.is_copied_view = key
    held.is_symbolic = is_symbolic
    last = len(held.shape) - 1
    held.is_sharded_inside = bool([dim for dim in held.layout.shard_dims if 0 < dim < last])
    held.is_expanded = (
        not is_symbolic
        and 0 in held.stride
        and any(step == 0 and size > 1 for size, step in zip(held.shape, held.stride, strict=True))
    )
    held.routes = {}
    held.plans = {}
    held.views = set()
    held.tensor_class = TensorLayout.classes[held.is_sharded_inside]
    held.tensor_meta = held
    held.has_lookup = MaskPartial in map(type, held.layout.placements)
    held.kind = Kind() if is_symbolic else _kind(held)
    return held


def _kind(held: TensorLayout) -> Kind:
    sizes = tuple([n if n < 2 else 2 for n in held.shape])
    key = (held.layout, held.dtype, held.reduced, held.is_copied_view, held.is_expanded, sizes)
    return held.comm.kinds.setdefault(key, Kind())
