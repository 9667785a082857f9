"""BoundPlan: an OpPlan on the process groups of its meshes, and what runs it.

What is learned when a plan first runs (the dtype of its results) is kept here, not in the plan, which is a value.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from longmesh._torch import OpOverload, make_around, make_quickly, no_dispatch
from longmesh.comm import MeshComm
from longmesh.rules.lookup import Masked
from longmesh.rules.steps import Slot
from longmesh.rules.tree import all_tensors, map_tensors
from longmesh.spec import Layout
from longmesh.spec.strides import global_stride, in_order_of
from longmesh.tensor.bind_steps import Comms, Frame, Run, bind_step
from longmesh.tensor.dtensor import DTensor
from longmesh.tensor.mask_buffer import PendingLookup
from longmesh.tensor.op_plan import NOTHING, Given, OpPlan, Output, Whole
from longmesh.tensor.plain import expect_lengths
from longmesh.tensor.tensor_layout import TensorLayout, tensor_layout
from longmesh.tensor.view_origin import remember_origin


class BoundOutput:
    """A result of a bound plan. `known`: its whole layout, once its dtype was seen, if that says all."""

    __slots__ = ("comm", "is_alias", "known", "layout", "shape", "shares", "slot", "stride")

    def __init__(self, output: Output, comms: Comms) -> None:
        self.layout, self.shape, self.stride, self.slot, self.shares, self.is_alias, mesh = output
        self.comm: MeshComm = comms[mesh]
        self.known: TensorLayout | None = None


class BoundPlan:
    """A plan, ready to run. `plain` and `known` are all that the dispatcher reads of one that is a single local call:
    what to call, and how its one new tensor is laid out, once it is known."""

    __slots__ = (
        "comms",
        "is_view",
        "known",
        "outputs",
        "plain",
        "plan",
        "result",
        "single",
        "steps",
        "written",
    )

    def __init__(self, plan: OpPlan, comms: Comms) -> None:
        self.plan, self.comms = plan, comms
        self.plain, self.written, self.is_view = plan.plain, plan.written, plan.is_view
        self.known: TensorLayout | None = None
        # Bound when they first run: a plain plan never runs its step.
        self.steps: list[Run] | None = None
        self.outputs = tuple([BoundOutput(output, comms) for output in plan.outputs])
        self.single = self.outputs[0] if plan.is_single else None
        self.result = self._bound(plan.result)

    def _bound(self, value: Any) -> Any:
        kind = type(value)
        if kind is Output:
            return BoundOutput(value, self.comms)
        return kind([self._bound(v) for v in value]) if kind is tuple or kind is list else value


def run_steps(plan: BoundPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Frame:
    """Run a plan's steps on a call. Collective where the plan is."""
    steps = plan.steps
    if steps is None:
        steps = plan.steps = [bind_step(step, plan.comms) for step in plan.plan.steps]
    tensors = all_tensors((args, kwargs))
    values = [t._local_tensor if isinstance(t, DTensor) else t for t in tensors]
    values += [None] * (plan.plan.num_slots - len(values))
    frame = Frame(args, kwargs, tensors, values)
    if plan.plan.drops:
        for run, dropped in zip(steps, plan.plan.drops, strict=True):
            run(frame)
            for slot in dropped:
                values[slot] = None
    else:
        for run in steps:
            run(frame)
    return frame


def execute(plan: BoundPlan, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op's plan on a call, and give what the op returns. Collective where the plan is."""
    frame = run_steps(plan, args, kwargs)
    if plan.result is None:
        return finish(plan, frame.values[-1], func, args, kwargs)
    with _wrapping(plan, args):
        result = fill_result(plan.result, frame, plan)
    if plan.plan.lengths is not None:
        expect_lengths(result[0], plan.plan.lengths)
    return _finish_view(plan, result, func, args, kwargs)


def finish(
    plan: BoundPlan, local: Any, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What an op returns, from what its only local call returned."""
    if plan.written is not None:
        return args[plan.written]
    if not plan.is_view:
        return (
            wrap_all(local, plan.outputs) if plan.single is None else _wrap_single(local, plan, plan.single)
        )
    with _wrapping(plan, args):
        single = plan.single
        result = wrap_all(local, plan.outputs) if single is None else _wrap_single(local, plan, single)
    return _finish_view(plan, result, func, args, kwargs)


def _wrap_single(local: Any, plan: BoundPlan, output: BoundOutput) -> DTensor:
    result = wrap(local, output)
    if plan.plain is not None and not (plan.is_view and plan.plan.is_copy):
        plan.known = output.known
    return result


def _wrapping(plan: BoundPlan, args: tuple[Any, ...]) -> AbstractContextManager[Any]:
    """Where results are made: a view of a tensor from outside an inference mode counts its writes with that."""
    if plan.is_view and torch.is_inference_mode_enabled() and not args[0].is_inference():
        return torch.inference_mode(False)
    return nullcontext()


def _finish_view(
    plan: BoundPlan, result: Any, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if plan.plan.replaces:
        return replace_target(func, args, kwargs, result)
    if plan.is_view and plan.plan.is_copy:
        remember_origin(result, func, args, kwargs)
    return result


def replace_target(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: DTensor
) -> DTensor:
    """An in-place view: the tensor it is called on gets the view's sizes and local tensor.

    Torch's own functions call these on results that nobody else has seen. Users' calls are checked by the methods
    (`refuse_reshape`).
    """
    target = args[0]
    with no_dispatch():
        func(*args, **kwargs)  # the wrapper's own sizes and strides
    target._take(result)
    return target


def fill_result(value: Any, frame: Frame, plan: BoundPlan) -> Any:
    """What a plan's `result` stands for, once its steps have run."""
    kind = type(value)
    if kind is BoundOutput:
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
        mesh = plan.comms[value.mesh].mesh
        whole = Layout.replicated(mesh)
        return map_tensors(lambda t: DTensor(t, mesh, whole, t.shape, t.stride()), frame.values[value.slot])
    if kind is tuple or kind is list:
        return kind([fill_result(v, frame, plan) for v in value])
    return None if value is NOTHING else value


def wrap(local: Any, output: BoundOutput) -> DTensor:
    """A DTensor around a local result."""
    known = output.known
    if known is not None and known.dtype is local.dtype:
        return make_quickly(known.tensor_class, local, known, False)
    mask = None
    if type(local) is Masked:
        local, mask = local
    shape = local.shape if output.shape is None else output.shape
    stride = global_stride(shape, local) if output.stride is None else output.stride
    known = tensor_layout(output.comm, output.layout, shape, stride, local.dtype)
    if output.stride is not None and not known.has_lookup:
        given, is_free = local, not (output.is_alias or known.is_symbolic or local.is_sparse)
        local = in_order_of(output.stride, given) if is_free else given
        output.known = known if local is given else None
    result = make_around(known.tensor_class, local, known, False)
    if mask is not None:
        result._lookup = PendingLookup.of_mask(mask)
    elif output.shares is None and known.has_lookup:  # this rank has all rows, the others none
        result._lookup = PendingLookup.of_mask(local.new_zeros([1] * local.ndim, dtype=torch.bool))
    return result


def wrap_all(result: Any, outputs: tuple[BoundOutput, ...]) -> Any:
    """Wrap the tensors of a result, in order; everything else is passed on."""
    kind = type(result)
    if kind is tuple or kind is list:
        if not outputs:  # lists that were written to; a view in no pieces
            return None if result else result
        if len(result) == len(outputs):
            return kind(map(wrap, result, outputs))
    following = iter(outputs)
    return map_tensors(lambda tensor: wrap(tensor, next(following)), result)
