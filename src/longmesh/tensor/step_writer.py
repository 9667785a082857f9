"""StepWriter: the vocabulary in which rules and families say what an op does. Each call adds a step to the plan.

x = p.linear_or_reduced(args[0])
local = p.local(torch.flip, x, dims)
return p.wrap(p.exchange([local], ...), x)
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from longmesh._torch import OpOverload, make_wrapper
from longmesh.comm import MeshComm
from longmesh.comm.groups import AxisGroup
from longmesh.comm.halo import Rows
from longmesh.comm.intervals import Interval, Pieces
from longmesh.spec import Coordinate, Layout, MaskPartial, Partial
from longmesh.spec.strides import contiguous_stride
from longmesh.tensor.arguments import check_scalar_mesh, refuse_meshes
from longmesh.tensor.autograd import apply_lookup_mask, gradient_layout
from longmesh.tensor.mask_buffer import without_mask
from longmesh.tensor.op_plan import Whole
from longmesh.tensor.planned import Part, Planned, Unplannable, as_slots, slot_of
from longmesh.tensor.sending_steps import Attend, Exchange, Gather, Halo, Recall, Redistribute
from longmesh.tensor.steps import ApplyMask, LocalCall, RunOps, Slot, Step
from longmesh.tensor.tensor_layout import TensorLayout, tensor_layout
from longmesh.tensor.tree import all_tensors, map_tensors


class StepWriter:
    """The steps of one op, in the making."""

    def __init__(
        self,
        comm: MeshComm,
        device: torch.device,
        families: dict[OpOverload, Any],
        warned: set[str],
    ) -> None:
        self.comm = comm
        self.device = device
        self.families = families
        # Whether tensors are traced, so that no value may be looked at.
        self.is_traced = False
        self.warned = warned
        self.steps: list[Step] = []
        self.num_slots = 0
        self.num_inputs = 0
        self.needs_values = False
        self.replaces = False
        self.depth = 0
        self.remembering: list[int] = []
        # What was noted before the op (`Dispatcher.notes`), and what is to be done with its result.
        self.note: Any = None
        self.after: Callable[[Any], None] | None = None

    # -- slots and tensors ---------------------------------------------------------------------

    def new_slot(self, count: int = 1) -> int:
        self.num_slots += count
        return self.num_slots - count

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
            own = tensor_layout(self.comm.mesh, whole, tensor.shape, tensor.stride(), tensor.dtype)
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
            x = self.planned(moved.slot, tensor_layout(self.comm.mesh, whole, (), (), own.dtype))
        return x

    def unmasked(self, x: Planned) -> Planned:
        """An input, the mask of its pending lookup applied."""
        own = x._tensor_layout
        plain = without_mask(own.layout)
        if plain is not own.layout:
            assert x.input is not None
            self.steps.append(ApplyMask(x.input, apply_lookup_mask))
            x._tensor_layout = own.with_layout(plain)
        return x

    @contextlib.contextmanager
    def on_mesh_of(self, x: Planned) -> Iterator[None]:
        """Ops on tensors of another mesh than the first."""
        before, self.comm = self.comm, x._tensor_layout.comm
        try:
            yield
        finally:
            self.comm = before

    # -- vocabulary ----------------------------------------------------------------------------

    def redistribute(self, x: Planned, layout: Layout, *, remembers: bool = False) -> Planned:
        """The same tensor in another layout."""
        own = x._tensor_layout
        if own.layout is layout:
            return x
        if own.reduced is not None and not layout.partial_axes:
            assert x.input is not None
            slot = self.new_slot()
            self.steps.append(Recall(x.input, slot, own))
            known = tensor_layout(own.mesh, own.reduced, own.shape, own.stride, own.dtype)
            return self.redistribute(self.planned(slot, known), layout)
        slot = self.new_slot()
        self.steps.append(Redistribute(x.slot, slot, own, layout, x.input, remembers))
        stride = contiguous_stride(own.shape)
        return self.planned(slot, tensor_layout(own.mesh, layout, own.shape, stride, own.dtype))

    def replicated(self, x: Any) -> Planned:
        return self.redistribute(x, Layout.replicated(x._layout.mesh))

    def reduced(self, x: Any) -> Planned:
        """The tensor without pending reductions."""
        return self.redistribute(x, gradient_layout(x._layout))

    def reduced_for_good(self, x: Planned) -> Planned:
        """As `reduced`; an input remembers the result, so that it is not reduced a second time."""
        return self.redistribute(x, gradient_layout(x._layout), remembers=True)

    def linear_or_reduced(self, x: Any) -> Planned:
        """Zeros may be put around a pending sum or average; any other pending reduction is carried out first."""
        pending = [p for p in x._layout.placements if isinstance(p, Partial)]
        if any(isinstance(p, MaskPartial) or p.reduce_op not in ("sum", "avg") for p in pending):
            return self.reduced(x)
        return x

    def local(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Part:
        """A computation on local parts, with one result. It sees this rank's parts and never communicates."""
        slot = self.new_slot()
        self.steps.append(LocalCall(call, as_slots(args), as_slots(kwargs), slot))
        return Part(slot)

    def locals(self, count: int, call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Part, ...]:
        """The same with `count` tensors as results."""
        if count == 1:
            return (self.local(lambda *a, **k: all_tensors(call(*a, **k))[0], *args, **kwargs),)
        slot = self.new_slot(count)
        self.steps.append(LocalCall(call, as_slots(args), as_slots(kwargs), slot, count))
        return tuple(Part(slot + i) for i in range(count))

    def gather(
        self, part: Any, like: Planned, axes: tuple[int, ...], shape: Sequence[int], dtype: torch.dtype
    ) -> Part:
        """What the ranks along `axes` have, each a tensor of `shape`, stacked in a new first dim in the order of
        `members`."""
        slot = self.new_slot()
        num_bytes = math.prod(shape) * dtype.itemsize
        group = like._tensor_layout.comm.group(axes)
        self.steps.append(Gather(slot_of(part), slot, group, num_bytes))
        return Part(slot)

    def members(self, like: Planned, axes: tuple[int, ...]) -> tuple[Coordinate, ...]:
        return like._tensor_layout.comm.group(axes).members

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
        """A tensor of `shape`, laid out as `like`, whose sharded dim `dim` is put together from all ranks' `pieces`.

        `pieces_of(coordinate)` says where a rank's pieces are along `dim`; the other dims are sharded already.
        """
        own = like._tensor_layout
        layout, dtype, shape = layout or own.layout, dtype or own.dtype, tuple(shape)
        rows = layout.local_shape(shape, own.comm.coordinate)

        def want(member: Coordinate) -> Interval:
            start, length = layout.interval(dim, shape[dim], member)
            return int(start), int(length)

        part = self.exchange_into(
            pieces,
            like,
            dim,
            pieces_of,
            want,
            fill=fill,
            axes=tuple(sorted(layout.shard_axes(dim))),
            row=math.prod(int(n) for d, n in enumerate(rows) if d != dim),
            dtype=dtype,
        )
        return self.wrap(part, like, layout=layout, shape=shape, dtype=dtype)

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
        """The interval of `dim` that each rank of `axes` wants, put together from the pieces that they have; `row`: the
        elements of one row of this rank's pieces. What is not given is as in `like`."""
        own = like._tensor_layout
        if row is None:
            row = math.prod(int(n) for d, n in enumerate(like.local_shape) if d != dim)
        group = own.comm.group(tuple(sorted(own.layout.shard_axes(dim))) if axes is None else axes)
        slot = self.new_slot()
        self.steps.append(
            Exchange(
                tuple(map(slot_of, pieces)),
                slot,
                tuple(map(have, group.members)),
                tuple(map(want, group.members)),
                dim,
                group,
                fill,
                row * (dtype or own.dtype).itemsize,
            )
        )
        return Part(slot)

    def halo(
        self,
        part: Any,
        dim: int,
        have: tuple[Rows, ...],
        need: tuple[Rows, ...],
        group: AxisGroup,
        row_bytes: int,
        *,
        home: bool = False,
    ) -> Part:
        """The rows of `dim` that a rank needs, fetched from those who have them; with `home`, sent back and added."""
        slot = self.new_slot()
        self.steps.append(Halo(slot_of(part), slot, dim, have, need, group, home, row_bytes))
        return Part(slot)

    def attend(
        self, count: int, call: Callable[..., Any], *args: Any, group: AxisGroup, sent_bytes: int
    ) -> tuple[Part, ...]:
        """Attention by the engine; not while tensors are traced, which can't see into it."""
        self.needs_values = True
        slot = self.new_slot(count)
        self.steps.append(Attend(call, as_slots(args), slot, count, group, sent_bytes))
        return tuple(Part(slot + i) for i in range(count))

    def wrap(
        self,
        part: Any,
        like: Planned,
        *,
        layout: Layout | None = None,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Planned:
        """The tensor whose local parts are in a slot; what is not given is as in `like`. Dense."""
        own = like._tensor_layout
        size = tuple(own.shape) if shape is None else tuple(shape)
        made = tensor_layout(
            own.mesh, layout or own.layout, size, contiguous_stride(size), dtype or own.dtype
        )
        return self.planned(slot_of(part), made)

    def on_whole_tensors(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Whole:
        """Every rank runs the op on whole inputs; what shapes come out, data may decide."""
        whole_args, whole_kwargs = map_tensors(lambda t: Slot(self.replicated(t).slot), (args, kwargs))
        slot = self.new_slot()
        self.steps.append(LocalCall(func, whole_args, whole_kwargs, slot))
        return Whole(slot, self.comm.mesh)

    def one_by_one(self, func: OpOverload, run: Callable[..., Any]) -> Part:
        """`run(func, args, kwargs)` on the call's own tensors: its ops are planned as they run, since values decide."""
        if self.depth > 1:
            raise Unplannable
        slot = self.new_slot()
        self.steps.append(RunOps(func, lambda *args, **kwargs: run(func, args, kwargs), slot))
        return Part(slot)

    def write(self, target: Planned, value: Planned) -> None:
        """Copy a value into a tensor, in place."""
        if target.is_copied_view:
            raise Unplannable
        moved = self.redistribute(value, target._layout)
        self.local(_copy, target, moved)


def _copy(target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return target.copy_(value)
