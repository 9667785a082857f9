"""What stands for tensors while a plan is made: their global layout and a slot, and no data.

Planned   a tensor: torch's ops on it are planned in turn
Part      a rank's intermediate result, which has no global meaning
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from longmesh._torch import no_torch_function
from longmesh.spec import Coordinate, Layout
from longmesh.tensor.steps import Slot
from longmesh.tensor.tensor_layout import TensorLayout
from longmesh.tensor.tree import all_tensors

if TYPE_CHECKING:
    from longmesh.tensor.planner import Planner


class Unplannable(Exception):
    """What an op does next depends on values: its ops are planned one by one, as they run."""


class Part(Slot):
    """A slot whose value has no global meaning: a rank's intermediate result."""


class Planned(torch.Tensor):
    """A tensor of a plan in the making: its global layout, and the slot of its local part. Holds no data."""

    _tensor_layout: TensorLayout
    planner: Planner
    slot: int
    # Of an input: which one. Whether its stride is known; else it is that of the local result.
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

    def interval(self, dim: int, where: Coordinate | None = None) -> tuple[int, int]:
        """Start and length of what a rank (this one) has of a dim."""
        own = self._tensor_layout
        start, length = own.layout.interval(dim, own.shape[dim], where or own.comm.coordinate)
        return int(start), int(length)

    @property
    def local_shape(self) -> tuple[int, ...]:
        own = self._tensor_layout
        return tuple(own.layout.local_shape(own.shape, own.comm.coordinate))  # pyright: ignore[reportReturnType]


def slot_of(part: Any) -> int:
    return part.slot if isinstance(part, Planned) else part.number


def as_slots(value: Any) -> Any:
    kind = type(value)
    if kind is Planned:
        return Slot(value.slot)
    if kind is Part or kind is Slot:
        return Slot(value.number)
    if kind is tuple or kind is list:
        return kind([as_slots(v) for v in value])
    return {k: as_slots(v) for k, v in value.items()} if kind is dict else value
