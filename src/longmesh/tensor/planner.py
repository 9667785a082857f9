"""Planner: what an op does, written down as steps.

    def flip(p, func, args, kwargs):                     # how a family of ops says it (tensor/ops)
        x = p.linear_or_reduced(args[0])
        local = p.local(torch.flip, x, dims)
        ...
        return p.wrap(p.exchange([local], ...), x)

A rule or a family runs once for each kind of call, on `Planned` tensors: they have a global layout and a slot, and no
data. Torch's ops on them are planned in turn, so an op that is made of others (a softmax over a sharded dim, a
decomposition of torch's) is written as it would be on plain tensors, and all of its steps end up in one plan.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from longmesh._torch import OpOverload, TorchDispatchMode, aten, make_wrapper, no_torch_function, schema_of
from longmesh.comm import MeshComm
from longmesh.comm.groups import AxisGroup
from longmesh.comm.halo import Rows
from longmesh.comm.intervals import Interval, Pieces
from longmesh.errors import LongmeshError
from longmesh.rules import Meta, OpCall, find_rule
from longmesh.rules.lookup import Masked
from longmesh.spec import Coordinate, Layout, MaskPartial, Partial
from longmesh.tensor.autograd import apply_lookup_mask, gradient_layout
from longmesh.tensor.by_rule import describe_call, local_form, pends_more
from longmesh.tensor.mask_buffer import MaskBuffer, without_mask
from longmesh.tensor.meta import contiguous_stride
from longmesh.tensor.op_facts import decomposition_of, facts_of, out_names, quick_call, result_on_meta
from longmesh.tensor.op_plan import NOTHING, Given, OpPlan, Output, Whole
from longmesh.tensor.propagate import choose
from longmesh.tensor.sending_steps import Attend, Exchange, Gather, Halo, Recall, Redistribute
from longmesh.tensor.steps import ApplyMask, Forget, LocalCall, RunOps, Slot, Step, drops
from longmesh.tensor.tensor_layout import TensorLayout, tensor_layout
from longmesh.tensor.tree import all_tensors, map_tensors

# Ops that are made of ops that are made of ops: deeper than this, one is made of itself.
_MAX_DEPTH = 30
# What a family returns where the op's rule does after all.
USUAL = object()


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
        found: list[Planned] = []
        map_tensors(lambda t: found.append(t) if isinstance(t, Planned) else None, (args, kwargs))
        return found[0].planner.op(func, args, kwargs or {})

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


class _Tracing(TorchDispatchMode):
    """Ops of a decomposition that have no tensor among their arguments (arange, zeros) are steps, too."""

    def __init__(self, planner: Planner) -> None:
        super().__init__()
        self._planner = planner

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with self:
            return self._planner.op(func, args, kwargs or {})


class Planner:
    """The steps of one op, in the making. `families`: ops that are planned by code of their own."""

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
                raise LongmeshError(
                    f"one op on tensors of two meshes: {self.comm.mesh} and {own.mesh}; bring them onto one mesh first "
                    "(full_tensor(), then distribute_tensor())"
                )
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
        stride = contiguous_stride(own.shape) if own.face_stride is not None else own.stride
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
        self.steps.append(LocalCall(call, _as_slots(args), _as_slots(kwargs), slot))
        return Part(slot)

    def locals(self, count: int, call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Part, ...]:
        """The same with `count` tensors as results."""
        if count == 1:
            first = self.local(lambda *a, **k: _only(call(*a, **k)), *args, **kwargs)
            return (first,)
        slot = self.new_slot(count)
        self.steps.append(LocalCall(call, _as_slots(args), _as_slots(kwargs), slot, count))
        return tuple(Part(slot + i) for i in range(count))

    def gather(
        self, part: Any, like: Planned, axes: tuple[int, ...], shape: Sequence[int], dtype: torch.dtype
    ) -> Part:
        """What the ranks along `axes` have, each a tensor of `shape`, stacked in a new first dim in the order of
        `members`."""
        slot = self.new_slot()
        num_bytes = math.prod(shape) * dtype.itemsize
        group = like._tensor_layout.comm.group(axes)
        self.steps.append(Gather(_slot(part), slot, group, num_bytes))
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
                tuple(map(_slot, pieces)),
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
        self.steps.append(Halo(_slot(part), slot, dim, have, need, group, home, row_bytes))
        return Part(slot)

    def attend(
        self, count: int, call: Callable[..., Any], *args: Any, group: AxisGroup, sent_bytes: int
    ) -> tuple[Part, ...]:
        """Attention by the engine; not while tensors are traced, which can't see into it."""
        self.needs_values = True
        slot = self.new_slot(count)
        self.steps.append(Attend(call, _as_slots(args), slot, count, group, sent_bytes))
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
        return self.planned(_slot(part), made)

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

    # -- ops -----------------------------------------------------------------------------------

    def op(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An op on planned tensors: its steps are added to the plan."""
        args, kwargs = map_tensors(self._as_planned, (args, kwargs))
        if self.depth > _MAX_DEPTH:
            raise Unplannable
        self.depth += 1
        try:
            family = self.families.get(func)
            result = USUAL if family is None else family(self, func, args, kwargs)
            if result is USUAL:
                result = self.by_rule(func, args, kwargs)
        finally:
            self.depth -= 1
        if self.depth and not _is_planned(result):
            raise Unplannable
        return result

    def _as_planned(self, tensor: torch.Tensor) -> Planned:
        """Plain tensors that a decomposition makes are equal on all ranks."""
        if isinstance(tensor, Planned):
            return self.ready_input(tensor)
        slot = self.local(tensor.clone)
        whole = Layout.replicated(self.comm.shape)
        own = tensor_layout(
            self.comm.mesh, whole, tensor.shape, contiguous_stride(tensor.shape), tensor.dtype
        )
        return self.planned(slot.number, own)

    def by_rule(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """By the op's rule, by other ops, or on whole tensors: whatever the op has, but for code of its own."""
        facts = facts_of(func)
        rule = find_rule(facts.rule_name)
        tensors: list[Planned] = []
        map_tensors(tensors.append, (args, kwargs))
        if rule is None or facts.has_out or not tensors:
            return self._without_rule(func, args, kwargs, tensors)
        call, layouts = describe_call(facts.functional or func, rule, args, kwargs)
        choice = choose(call, rule.axis_rules(call), layouts, None if facts.functional is None else 0)
        form = None if choice is None else local_form(func, facts, rule, call, choice, self.comm)
        if choice is None or form is None:
            assert facts.functional is not None
            return self._write_back(func, facts.functional, args, kwargs)
        if facts.functional is not None and tensors[0].is_copied_view:
            raise Unplannable
        moved = [self.redistribute(t, y) for t, y in zip(tensors, choice.inputs, strict=True)]
        static = (call.args, dict(call.kwargs)) if form.static is None else form.static
        local_args, local_kwargs = slots_for_metas(static, [t.slot for t in moved])
        local_call = torch.reshape if func in _VIEWS and form.call is quick_call(func) else form.call
        if facts.functional is not None:
            self.local(local_call, *local_args, **local_kwargs)
            return args[0]
        if any(without_mask(y) is not y for y in choice.outputs):
            local_call = _unmasked(local_call)
        structure = result_on_meta(call)
        metas: list[torch.Tensor] = []
        map_tensors(metas.append, structure)
        parts = self.locals(len(metas), local_call, *local_args, **local_kwargs) if metas else ()
        stays = all(a is b for a, b in zip(moved, tensors, strict=True))
        is_copy = facts.is_view and (not stays or pends_more(choice.inputs, choice.outputs))
        results = iter(
            [
                self.planned(
                    part.number,
                    tensor_layout(
                        self.comm.mesh,
                        without_mask(layout),
                        meta.shape,
                        contiguous_stride(meta.shape),
                        found.dtype,
                    ),
                    is_copied_view=is_copy,
                )
                for part, layout, meta, found in zip(parts, choice.outputs, call.outputs, metas, strict=True)
            ]
        )
        return map_tensors(lambda _: next(results), structure)

    def _without_rule(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Planned]
    ) -> Any:
        functional = facts_of(func).functional
        if functional is not None:
            return self._write_back(func, functional, args, kwargs)
        if func is aten._local_scalar_dense.default or func is aten.item.default:
            raise Unplannable
        if not tensors:
            return self._make(func, args, kwargs)
        if decomposition_of(func) is not None:
            return self.decompose(func, args, kwargs)
        self.warn_of(func)
        return self.on_whole_tensors(func, args, kwargs)

    def decompose(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """By the ops that it is made of."""
        decomposition = decomposition_of(func)
        assert decomposition is not None, f"{func} is made of no other ops"
        with _Tracing(self):
            return decomposition(*args, **kwargs)

    def warn_of(self, func: OpOverload) -> None:
        name = str(func)
        if name not in self.warned:
            self.warned.add(name)
            warnings.warn(
                f"{name} has no sharding rule: its inputs are replicated on every rank. Register one with "
                "register_sharding, or redistribute to Replicate() yourself to silence this",
                stacklevel=4,
            )

    def _make(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A factory function inside a decomposition: every rank makes the whole."""
        found = result_on_meta(OpCall(func, args, kwargs, ()))
        if not isinstance(found, torch.Tensor):
            raise Unplannable
        part = self.local(func, *args, **kwargs)
        own = tensor_layout(
            self.comm.mesh, Layout.replicated(self.comm.shape), found.shape, found.stride(), found.dtype
        )
        return self.planned(part.number, own)

    def _write_back(
        self, func: OpOverload, functional: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """An in-place or out= op whose target can't stay where it is: compute, redistribute, copy."""
        outs = out_names(func)
        targets = [kwargs[name] for name in outs] or [args[0]]
        kwargs = {k: v for k, v in kwargs.items() if k not in outs}
        result = self.op(functional, args, kwargs)
        if torch.Tag.inplace_view in func.tags:
            if self.depth > 1:
                raise Unplannable
            self.replaces = True
            return result
        results = result if isinstance(result, (tuple, list)) else [result]
        for target, value in zip(targets, results, strict=False):
            if target.shape != value.shape:
                raise LongmeshError(
                    f"{func} would give the DTensor it writes to another shape: {tuple(target.shape)} -> "
                    f"{tuple(value.shape)}; use the op that returns a new tensor"
                )
            self.write(target, value)
        return targets[0] if len(targets) == 1 else tuple(targets)

    # -- the plan ------------------------------------------------------------------------------

    def plan(
        self, func: OpOverload, result: Any, how: str, strides: Sequence[tuple[int, ...]] = ()
    ) -> OpPlan:
        """The plan of an op whose result is made of planned tensors. `strides`: theirs, where they are known."""
        facts = facts_of(func)
        kept: set[int] = set()
        following = iter(strides)

        def leaf(value: Any) -> Any:
            if isinstance(value, Planned):
                if value.input is not None and schema_of(func).is_mutable:
                    return Given(value.input)
                kept.add(value.slot)
                own = value._tensor_layout
                shares = 0 if own.has_lookup else None
                stride = next(following, None)
                return Output(own.mesh, own.layout, own.shape, stride, value.slot, shares, facts.is_view)
            if isinstance(value, Output):
                kept.add(value.slot)
            if isinstance(value, Slot):
                kept.add(value.number)
                return Slot(value.number)
            if isinstance(value, Whole):
                kept.add(value.slot)
                return value
            if isinstance(value, (list, tuple)):
                return [leaf(v) for v in value] if isinstance(value, list) else tuple(leaf(v) for v in value)
            return value

        if schema_of(func).is_mutable:
            self.steps += [Forget(number) for number in self.remembering]
        steps = tuple(self.steps)
        is_copied_view = any(isinstance(t, Planned) and t.is_copied_view for t in all_tensors(result))
        template = leaf(result)
        return OpPlan(
            steps=steps,
            result=NOTHING if template is None else template,
            num_slots=self.num_slots,
            drops=drops(steps, kept, self.num_inputs),
            replaces=self.replaces,
            is_view=facts.is_view,
            is_copy=is_copied_view
            or any(step.is_collective or isinstance(step, (Redistribute, Exchange)) for step in steps),
            needs_values=self.needs_values,
            after=self.after,
            how=how,
        )


_VIEWS = (aten.view.default, aten._unsafe_view.default)


def _copy(target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return target.copy_(value)


def _only(result: Any) -> Any:
    """The one tensor of a result."""
    found: list[torch.Tensor] = []
    map_tensors(found.append, result)
    return found[0]


def _unmasked(call: Callable[..., Any]) -> Callable[..., Any]:
    """A lookup whose mask is applied at once."""

    def run(*args: Any, **kwargs: Any) -> Any:
        found = call(*args, **kwargs)
        return MaskBuffer(found.mask).apply_mask(found.result) if type(found) is Masked else found

    return run


def _slot(part: Any) -> int:
    return part.slot if isinstance(part, Planned) else part.number


def _as_slots(value: Any) -> Any:
    kind = type(value)
    if kind is Planned:
        return Slot(value.slot)
    if kind is Part or kind is Slot:
        return Slot(value.number)
    if kind is tuple or kind is list:
        return kind([_as_slots(v) for v in value])
    return {k: _as_slots(v) for k, v in value.items()} if kind is dict else value


def slots_for_metas(value: Any, slots: list[int]) -> Any:
    """Arguments with slots in the places of metas."""
    if isinstance(value, Meta):
        return Slot(slots[value.index])
    if isinstance(value, (list, tuple)):
        return type(value)(slots_for_metas(v, slots) for v in value)
    return {k: slots_for_metas(v, slots) for k, v in value.items()} if isinstance(value, dict) else value


def _is_planned(value: Any) -> bool:
    """Whether a result can be computed with further."""
    if isinstance(value, (list, tuple)) and not isinstance(value, (Slot, Whole, Given)):
        return all(map(_is_planned, value))
    return isinstance(value, Planned) or value is None or isinstance(value, int)
