"""OpPlan: all that an op on DTensors does, decided once and written down as steps; and what runs it.

y = x + w            GivenCall(add)                                  -> S(0)
cumsum, sharded dim  LocalCall(scan), Gather(totals), LocalCall(add) -> S(0)
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from longmesh._torch import OpOverload, base_of, is_tracing, make_quickly, no_dispatch, reference_count
from longmesh.errors import LongmeshError
from longmesh.rules.lookup import Masked
from longmesh.spec import Layout
from longmesh.tensor.dtensor import DTensor, wrap as wrap_tensor
from longmesh.tensor.mask_buffer import PendingLookup
from longmesh.tensor.meta import global_stride, in_order_of
from longmesh.tensor.steps import Frame, Slot, Step
from longmesh.tensor.tensor_layout import TensorLayout, tensor_layout
from longmesh.tensor.tree import all_tensors, map_tensors
from longmesh.tensor.view_origin import remember_origin


@dataclass(slots=True, eq=False, repr=False)
class Output:
    """One tensor that an op gives: its slot, mesh, layout, global shape and stride.

    No shape: data decides it, and the result is whole on every rank. No stride: as the local result's dims are in
    memory. `shares`: the input whose pending lookup this is, too; `is_alias`: on the same memory. `known`: filled in
    when the dtype is first seen, if it says all.
    """

    mesh: DeviceMesh
    layout: Layout
    shape: tuple[int, ...] | None
    stride: tuple[int, ...] | None
    slot: int = -1
    shares: int | None = None
    is_alias: bool = False
    known: TensorLayout | None = None


# In the place of a result that is not one new tensor: it has no layout that could be known.
_SEVERAL: Output = object.__new__(Output)
_SEVERAL.known = None


class Given(NamedTuple):
    """In a result: the tensor argument of this number, which was written to."""

    number: int


class Whole(NamedTuple):
    """In a result: all that is in the slot, its tensors whole on every rank."""

    slot: int
    mesh: DeviceMesh


# In a result: None. (A plan whose `result` is None has the result of its last step.)
NOTHING = object()


@dataclass(slots=True, eq=False)
class OpPlan:
    """How one op call runs: `steps`, and then what is made of the slots.

    `result`: the returned value, with Output, Given, Whole and Slot in the places of what is in slots; None where the
    last step's own return value is wrapped, its tensors as `outputs` say. `plain`: the local call of a plan that is
    nothing but that call on the inputs as they are: the one case that the dispatcher writes out. `written`: the
    argument that an in-place op returns; `replaces`: its local tensor is replaced (t_, squeeze_). `is_view`: of a view
    op, `is_copy` if its result does not share the input's memory. `needs_values`: not while tensors are traced.
    `after`: called with the result. `quick`: the result of a plain plan that is one new tensor; once its layout is
    known, wrapping is all that is left to do. Nobody writes to a plan; it is not `frozen`, which
    takes longer to make.
    """

    steps: tuple[Step, ...]
    outputs: tuple[Output, ...] = ()
    result: Any = None
    num_slots: int = 0
    drops: tuple[tuple[int, ...], ...] = ()
    single: Output | None = None
    plain: Callable[..., Any] | None = None
    written: int | None = None
    replaces: bool = False
    is_view: bool = False
    is_copy: bool = False
    needs_values: bool = False
    after: Callable[[Any], None] | None = None
    how: str = "rule"
    quick: Output = field(init=False)

    def __post_init__(self) -> None:
        is_quick = self.plain is not None and self.written is None and not (self.is_view and self.is_copy)
        self.quick = self.single if is_quick and self.single is not None else _SEVERAL

    @property
    def sent_bytes(self) -> int:
        """What this rank sends, exactly."""
        return sum(step.sent_bytes for step in self.steps)


def run_steps(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Frame:
    """Run a plan's steps on a call. Collective where the plan is."""
    tensors = all_tensors((args, kwargs))
    values = [t._local_tensor if isinstance(t, DTensor) else t for t in tensors]
    values += [None] * (plan.num_slots - len(values))
    frame = Frame(args, kwargs, tensors, values)
    if plan.drops:
        for step, dropped in zip(plan.steps, plan.drops, strict=True):
            step.run(frame)
            for slot in dropped:
                values[slot] = None
    else:
        for step in plan.steps:
            step.run(frame)
    return frame


def execute(plan: OpPlan, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op's plan on a call, and give what the op returns. Collective where the plan is."""
    frame = run_steps(plan, args, kwargs)
    if plan.result is None:
        return finish(plan, frame.values[-1], func, args, kwargs)
    with _wrapping(plan, args):
        result = fill_result(plan.result, frame)
    if plan.after is not None:
        plan.after(result)
    return _finish_view(plan, result, func, args, kwargs)


def finish(plan: OpPlan, local: Any, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an op returns, from what its only local call returned."""
    if plan.written is not None:
        return args[plan.written]
    if not plan.is_view:
        return wrap_all(local, plan.outputs) if plan.single is None else wrap(local, plan.single)
    with _wrapping(plan, args):
        result = wrap_all(local, plan.outputs) if plan.single is None else wrap(local, plan.single)
    return _finish_view(plan, result, func, args, kwargs)


def _wrapping(plan: OpPlan, args: tuple[Any, ...]) -> AbstractContextManager[Any]:
    """Where results are made: a view of a tensor from outside an inference mode counts its writes with that."""
    if plan.is_view and torch.is_inference_mode_enabled() and not args[0].is_inference():
        return torch.inference_mode(False)
    return nullcontext()


def _finish_view(
    plan: OpPlan, result: Any, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if plan.replaces:
        return replace_target(func, args, kwargs, result)
    if plan.is_view and plan.is_copy:
        remember_origin(result, func, args, kwargs)
    return result


def replace_target(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: DTensor
) -> DTensor:
    """An in-place view: the tensor it is called on gets the view's sizes and local tensor."""
    target = args[0]
    if target.requires_grad and _has_views(target):
        raise LongmeshError(
            f"{func} of a DTensor of shape {tuple(target.shape)} that needs a gradient and has views (or was saved for "
            "a backward): autograd would take them as views of the new shape; use the op that returns a new tensor, or "
            "make the views afterwards"
        )
    with no_dispatch():
        func(*args, **kwargs)  # the wrapper's own sizes and strides
    target._take(result)
    return target


# References to a tensor whose in-place op is running, at the most; a view of it adds two.
_HELD_BY_OPS = 4


def _has_views(tensor: DTensor) -> bool:
    """Whether a view of the tensor is alive, or a node of autograd has saved it. The same on every rank."""
    if base_of(tensor) is not None or is_tracing() or reference_count(tensor) <= _HELD_BY_OPS:
        return False
    gc.collect()  # what is dead may still be there on some ranks
    return reference_count(tensor) > _HELD_BY_OPS


def fill_result(value: Any, frame: Frame) -> Any:
    """What a plan's `result` stands for, once its steps have run."""
    kind = type(value)
    if kind is Output:
        result = wrap(frame.values[value.slot], value)
        lookup = None if value.shares is None else frame.tensors[value.shares]._lookup
        if lookup is not None:
            result._lookup = lookup.share() if value.is_alias else lookup.copy()
        return result
    if kind is Given:
        return frame.tensors[value.number]
    if kind is Slot:
        return frame.values[value.number]
    if kind is Whole:
        whole = Layout.replicated(value.mesh)
        return map_tensors(
            lambda t: DTensor(t, value.mesh, whole, t.shape, t.stride()), frame.values[value.slot]
        )
    if kind is tuple or kind is list:
        return kind([fill_result(v, frame) for v in value])
    return None if value is NOTHING else value


def wrap(local: Any, output: Output) -> DTensor:
    """A DTensor around a local result."""
    known = output.known
    if known is not None and known.dtype is local.dtype:
        return make_quickly(known.tensor_class, local, known, False)
    mask = None
    if type(local) is Masked:
        local, mask = local
    shape = local.shape if output.shape is None else output.shape
    stride = global_stride(shape, local) if output.stride is None else output.stride
    known = tensor_layout(output.mesh, output.layout, shape, stride, local.dtype)
    if output.stride is not None and not known.has_lookup:
        given, is_free = local, not (output.is_alias or known.is_symbolic or local.is_sparse)
        local = in_order_of(output.stride, given) if is_free else given
        output.known = known if local is given else None
    result = wrap_tensor(local, known)
    if mask is not None:
        result._lookup = PendingLookup.of_mask(mask)
    elif output.shares is None and known.has_lookup:  # this rank has all rows, the others none
        result._lookup = PendingLookup.of_mask(local.new_zeros([1] * local.ndim, dtype=torch.bool))
    return result


def wrap_all(result: Any, outputs: tuple[Output, ...]) -> Any:
    """Wrap the tensors of a result, in order; everything else is passed on."""
    kind = type(result)
    if kind is tuple or kind is list:
        if not outputs:  # lists that were written to; a view in no pieces
            return None if result else result
        if len(result) == len(outputs):
            return kind(map(wrap, result, outputs))
    following = iter(outputs)
    return map_tensors(lambda tensor: wrap(tensor, next(following)), result)
