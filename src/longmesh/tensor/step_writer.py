"""StepWriter: the vocabulary of programs (`rules/writer.py`), each call of which adds a step to the plan."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch

from longmesh._torch import OpOverload, make_wrapper
from longmesh.rules.pieces import without_pending
from longmesh.rules.planned import Part, Planned, Unplannable, as_slots, slot_of
from longmesh.rules.steps import (
    ApplyMask,
    Exchange,
    Execute,
    Gather,
    Halo,
    Interval,
    LocalCall,
    Pieces,
    Recall,
    Redistribute,
    Rows,
    RunOps,
    Step,
)
from longmesh.rules.tree import map_tensors
from longmesh.spec import Coordinate, Layout, MaskPartial, MeshShape, Partial
from longmesh.spec.strides import contiguous_stride
from longmesh.tensor.arguments import check_scalar_mesh, refuse_meshes
from longmesh.tensor.mask_buffer import without_mask
from longmesh.tensor.op_plan import Whole
from longmesh.tensor.plain import refuse_mix
from longmesh.tensor.tensor_layout import TensorLayout, tensor_layout


class StepWriter:
    """The steps of one op, in the making. `comm`: of the mesh that it runs on, a MeshComm or a MeshRank."""

    def __init__(self, comm: Any, device: torch.device) -> None:
        self.comm = comm
        self.device = device
        self.is_traced = False
        self.steps: list[Step] = []
        # The meshes of the plan, which steps name by their numbers.
        self.comms: list[Any] = [comm]
        self.num_slots = 0
        self.num_inputs = 0
        self.needs_values = False
        self.replaces = False
        self.depth = 0
        self.remembering: list[int] = []
        self.note: Any = None
        self.lengths: int | None = None

    @property
    def mesh(self) -> MeshShape:
        return self.comm.shape

    @property
    def coordinate(self) -> Coordinate:
        return self.comm.coordinate

    # -- slots and tensors ---------------------------------------------------------------------

    def new_slot(self, count: int = 1) -> int:
        self.num_slots += count
        return self.num_slots - count

    def mesh_number(self, comm: Any) -> int:
        """The number of a mesh among those of the plan."""
        for number, known in enumerate(self.comms):
            if known is comm or known.mesh == comm.mesh:
                return number
        self.comms.append(comm)
        return len(self.comms) - 1

    def planned(self, slot: int, own: TensorLayout, *, is_copied_view: bool = False) -> Planned:
        result = make_wrapper(Planned, own.shape, own.stride, 0, None, own.dtype, torch.strided, self.device)
        result._tensor_layout = own
        result.planner = self
        result.slot = slot
        result.input = None
        result.is_copied_view = is_copied_view
        result.is_plain = False
        return result

    def add_input(self, tensor: torch.Tensor, number: int) -> Planned:
        """The op's tensor argument `number`: a DTensor, or a plain one that is equal on all ranks."""
        slot = self.new_slot()
        self.num_inputs += 1
        own = getattr(tensor, "_tensor_layout", None)
        is_plain = own is None
        if own is None:
            whole = Layout.replicated(self.comm.shape)
            own = tensor_layout(self.comm, whole, tensor.shape, tensor.stride(), tensor.dtype)
        if own.reduced is not None:
            self.remembering.append(number)
        result = self.planned(slot, own)
        result.input, result.is_plain = number, is_plain
        return result

    def ready_input(self, x: Planned) -> Planned:
        """An input whose pending lookup is a plain pending sum, and which is on the op's mesh if it is a scalar."""
        x = self.unmasked(x)
        own = x._tensor_layout
        if own.comm is not self.comm and own.mesh != self.comm.mesh:
            if own.shape:
                refuse_meshes(self.comm.mesh, own.mesh)
            check_scalar_mesh(self.comm.mesh, own.mesh)
            moved = self.replicated(x)
            whole = Layout.replicated(self.comm.shape)
            x = self.planned(moved.slot, tensor_layout(self.comm, whole, (), (), own.dtype))
        return x

    def unmasked(self, x: Planned) -> Planned:
        """An input, the mask of its pending lookup applied."""
        own = x._tensor_layout
        if own.has_lookup:
            assert x.input is not None
            self.steps.append(ApplyMask(x.input))
            x._tensor_layout = own.with_layout(without_mask(own.layout))
        return x

    @contextlib.contextmanager
    def on_mesh_of(self, x: Planned) -> Iterator[None]:
        before, self.comm = self.comm, x._tensor_layout.comm
        try:
            yield
        finally:
            self.comm = before

    def check_scalar(self, value: Planned, members: Sequence[Planned]) -> None:
        for mesh in {id(t._mesh): t._mesh for t in members if not t.is_plain}.values():
            check_scalar_mesh(mesh, value._mesh)

    def refuse_mix(self, func: OpOverload, tensors: Sequence[Any]) -> NoReturn:
        refuse_mix(func, tensors)

    # -- vocabulary ----------------------------------------------------------------------------

    def redistribute(self, x: Planned, layout: Layout, *, remembers: bool = False) -> Planned:
        own = x._tensor_layout
        if own.layout is layout:
            return x
        if own.reduced is not None and not layout.partial_axes:
            assert x.input is not None
            slot = self.new_slot()
            self.steps.append(Recall(x.input, slot))
            known = tensor_layout(own.comm, own.reduced, own.shape, own.stride, own.dtype)
            return self.redistribute(self.planned(slot, known), layout)
        stride = contiguous_stride(own.shape)
        slot = self.move(x.slot, own, layout, x.input, remembers)
        return self.planned(slot, tensor_layout(own.comm, layout, own.shape, stride, own.dtype))

    def move(
        self, slot: int, own: TensorLayout, layout: Layout, number: int | None, remembers: bool = False
    ) -> int:
        """The slot of a tensor's local part in another layout."""
        out, mesh = self.new_slot(), self.mesh_number(own.comm)
        shape = tuple(own.shape)
        self.steps.append(
            Redistribute(slot, out, own.layout, layout, shape, own.dtype, number, remembers, mesh)
        )
        return out

    def replicated(self, x: Any) -> Planned:
        return self.redistribute(x, Layout.replicated(x._layout.mesh))

    def reduced(self, x: Any) -> Planned:
        return self.redistribute(x, without_pending(x._layout))

    def linear_or_reduced(self, x: Any) -> Planned:
        pending = [p for p in x._layout.placements if isinstance(p, Partial)]
        if any(isinstance(p, MaskPartial) or p.reduce_op not in ("sum", "avg") for p in pending):
            return self.reduced(x)
        return x

    def local(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Part:
        slot = self.new_slot()
        self.steps.append(LocalCall(call, as_slots(args), as_slots(kwargs), slot))
        return Part(slot)

    def locals(self, count: int, call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Part, ...]:
        slot = self.new_slot(count)
        self.steps.append(LocalCall(call, as_slots(args), as_slots(kwargs), slot, count))
        return tuple(Part(slot + i) for i in range(count))

    def gather(
        self, part: Any, like: Planned, axes: tuple[int, ...], shape: Sequence[int], dtype: torch.dtype
    ) -> Part:
        slot = self.new_slot()
        num_bytes = math.prod(shape) * dtype.itemsize
        self.steps.append(
            Gather(slot_of(part), slot, axes, num_bytes, self.mesh_number(like._tensor_layout.comm))
        )
        return Part(slot)

    def members(self, like: Planned, axes: tuple[int, ...]) -> tuple[Coordinate, ...]:
        return like._layout.mesh.members(axes, like.coordinate)

    def exchange(
        self,
        pieces: Sequence[Any],
        like: Planned,
        shape: Sequence[int],
        dim: int,
        pieces_of: Callable[[Coordinate], Pieces],
        *,
        fill: Any = 0,
        layout: Layout | None = None,
        dtype: torch.dtype | None = None,
    ) -> Planned:
        own = like._tensor_layout
        there: Layout = layout or own.layout
        dtype, shape = dtype or own.dtype, tuple(shape)
        rows = there.local_shape(shape, own.comm.coordinate)

        def want(member: Coordinate) -> Interval:
            start, length = there.interval(dim, shape[dim], member)
            return int(start), int(length)

        part = self.exchange_into(
            pieces,
            like,
            dim,
            pieces_of,
            want,
            fill=fill,
            axes=tuple(sorted(there.shard_axes(dim))),
            row=math.prod(int(n) for d, n in enumerate(rows) if d != dim),
            dtype=dtype,
        )
        return self.wrap(part, like, layout=there, shape=shape, dtype=dtype)

    def exchange_into(
        self,
        pieces: Sequence[Any],
        like: Planned,
        dim: int,
        have: Callable[[Coordinate], Pieces],
        want: Callable[[Coordinate], Interval],
        *,
        fill: Any = 0,
        axes: tuple[int, ...] | None = None,
        row: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> Part:
        own = like._tensor_layout
        if row is None:
            row = math.prod(int(n) for d, n in enumerate(like.local_shape) if d != dim)
        axes = tuple(sorted(own.layout.shard_axes(dim))) if axes is None else axes
        members, slot = self.members(like, axes), self.new_slot()
        self.steps.append(
            Exchange(
                tuple(map(slot_of, pieces)),
                slot,
                tuple(map(have, members)),
                tuple(map(want, members)),
                dim,
                axes,
                fill,
                row * (dtype or own.dtype).itemsize,
                self.mesh_number(own.comm),
            )
        )
        return Part(slot)

    def halo(
        self,
        part: Any,
        dim: int,
        have: tuple[Rows, ...],
        need: tuple[Rows, ...],
        axes: tuple[int, ...],
        row_bytes: int,
        *,
        home: bool = False,
    ) -> Part:
        slot, mesh = self.new_slot(), self.mesh_number(self.comm)
        self.steps.append(Halo(slot_of(part), slot, dim, have, need, axes, home, row_bytes, mesh))
        return Part(slot)

    def execute(
        self, count: int | None, name: str, options: tuple[Any, ...], *args: Any, axes: tuple[int, ...] = ()
    ) -> Any:
        self.needs_values = self.needs_values or bool(axes)
        slot, mesh = self.new_slot(count or 1), self.mesh_number(self.comm)
        self.steps.append(Execute(name, as_slots(args), options, slot, count, axes, mesh))
        return Part(slot) if count is None else tuple(Part(slot + i) for i in range(count))

    def wrap(
        self,
        part: Any,
        like: Planned,
        *,
        layout: Layout | None = None,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Planned:
        own = like._tensor_layout
        size = tuple(own.shape) if shape is None else tuple(shape)
        made = tensor_layout(
            own.comm, layout or own.layout, size, contiguous_stride(size), dtype or own.dtype
        )
        return self.planned(slot_of(part), made)

    def whole(self, part: Part) -> Whole:
        return Whole(part.number, self.mesh_number(self.comm))

    def pending_like(self, part: Part, like: Planned) -> Planned:
        return self.planned(part.number, like._tensor_layout)

    def on_whole_tensors(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Whole:
        args, kwargs = map_tensors(self.replicated, (args, kwargs))
        return self.whole(self.local(func, *args, **kwargs))

    def one_by_one(self, func: OpOverload, run: Callable[..., Any]) -> Part:
        if self.depth > 1:
            raise Unplannable
        slot = self.new_slot()
        self.steps.append(RunOps(func, run, slot))
        return Part(slot)

    def write(self, target: Planned, value: Planned) -> None:
        if target.is_copied_view:
            raise Unplannable
        moved = self.redistribute(value, target._layout)
        self.local(_copy, target, moved)


def _copy(target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return target.copy_(value)
