"""Held: how one tensor lies on a mesh (mesh, layout, global shape, stride, dtype), as one interned object.

Every DTensor points to one, and an op's cache key is made of them: comparing and hashing by identity is what
makes looking up an op's plan cheap. Sizes that are symbolic don't hash; such a `Held` is nobody else's, and
what depends on it is not cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from longmesh.comm import MeshComm, comm_of
from longmesh.spec import Layout


class Held:
    """How a tensor is held. Interned unless `is_symbolic`: equal means identical."""

    __slots__ = ("comm", "dtype", "is_symbolic", "layout", "mesh", "shape", "stride")

    comm: MeshComm
    mesh: DeviceMesh
    layout: Layout
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_symbolic: bool

    def with_layout(self, layout: Layout) -> Held:
        return hold(self.mesh, layout, self.shape, self.stride, self.dtype)


class _Registry:
    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Held] = {}

    def get(
        self,
        mesh: DeviceMesh,
        layout: Layout,
        shape: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
    ) -> Held:
        comm = comm_of(mesh)
        key = (comm, layout, shape, stride, dtype)
        try:
            found = self._known.get(key)
        except TypeError:
            if type(shape) is list or type(stride) is list:
                return self.get(mesh, layout, tuple(shape), tuple(stride), dtype)
            return self._make(mesh, key, is_symbolic=True)
        if found is None:
            found = self._known[key] = self._make(mesh, key, is_symbolic=False)
        return found

    def _make(self, mesh: DeviceMesh, key: tuple[Any, ...], *, is_symbolic: bool) -> Held:
        held = object.__new__(Held)
        held.mesh = mesh
        held.comm, held.layout, held.shape, held.stride, held.dtype = key
        held.is_symbolic = is_symbolic
        return held


_registry = _Registry()

hold = _registry.get
