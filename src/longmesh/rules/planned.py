"""What stands for tensors while a plan is made: their global layout and a slot, and no data.

Planned   a tensor: torch's ops on it are planned in turn
Part      a rank's intermediate result, which has no global meaning
"""

from __future__ import annotations

from typing import Any

import torch

from longmesh._torch import no_torch_function
from longmesh.rules.steps import Slot
from longmesh.rules.tree import all_tensors
from longmesh.spec import Coordinate, Layout


class Unplannable(Exception):
    """What an op does next depends on values: its ops are planned one by one, as they run."""


class Part(Slot):
    """A slot whose value has no global meaning: a rank's intermediate result."""


class Planned(torch.Tensor):
    """A tensor of a plan in the making: its global layout, and the slot of its local part. Holds no data."""

    # A TensorLayout, and the writer of the plan.
    _tensor_layout: Any
    planner: Any
    slot: int
    # Of an input: which one. Whether it is a plain tensor, equal on all ranks.
    input: int | None
    is_copied_view: bool
    is_plain: bool

    __torch_function__ = no_torch_function  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first = next(t for t in all_tensors((args, kwargs)) if isinstance(t, Planned))
        return first.planner.op(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Torch prints tensors where it looks for an overload that takes them: that must not be planned."""
        return f"Planned(slot={self.slot}, shape={tuple(self._tensor_layout.shape)}, layout={self._layout})"

    @property
    def _layout(self) -> Layout:
        return self._tensor_layout.layout

    @property
    def _mesh(self) -> Any:
        return self._tensor_layout.mesh

    @property
    def global_layout(self) -> Layout:
        """How it is sharded: `layout` is torch's word for strided."""
        return self._tensor_layout.layout

    @property
    def comm(self) -> Any:
        """Tensors of one mesh have the same."""
        return self._tensor_layout.comm

    @property
    def coordinate(self) -> Coordinate:
        """This rank's place in the tensor's mesh."""
        return self._tensor_layout.comm.coordinate

    def interval(self, dim: int, where: Coordinate | None = None) -> tuple[int, int]:
        """Start and length of what a rank (this one) has of a dim."""
        own = self._tensor_layout
        start, length = own.layout.interval(dim, own.shape[dim], where or own.comm.coordinate)
        return int(start), int(length)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's part."""
        own = self._tensor_layout
        return tuple(own.layout.local_shape(own.shape, own.comm.coordinate))


def slot_of(part: Any) -> int:
    return part.slot if isinstance(part, Planned) else part.number


def as_slots(value: Any) -> Any:
    """Arguments with slots in the places of planned tensors and parts."""
    kind: Any = type(value)  # pyright: ignore[reportUnknownVariableType]
    if kind is Planned:
        return Slot(value.slot)
    if kind is Part or kind is Slot:
        return Slot(value.number)
    if kind is tuple or kind is list:
        return kind([as_slots(v) for v in value])  # pyright: ignore[reportUnknownVariableType]
    return {k: as_slots(v) for k, v in value.items()} if kind is dict else value
