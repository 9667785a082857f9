"""From a rule to a local call: the layouts that a call takes and gives, and what each rank runs.

Pure: every rank makes the same choice from the same call; only the local call's own arguments may differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from longmesh._torch import OpOverload
from longmesh.comm import MeshComm
from longmesh.rules import LocalView, Meta, OpCall, Rule
from longmesh.spec import Coordinate, Layout
from longmesh.tensor.op_facts import OpFacts, quick_call, run_on_meta
from longmesh.tensor.propagate import Choice
from longmesh.tensor.tree import map_tensors


def describe_call(
    func: OpOverload, rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[OpCall, tuple[Layout, ...]]:
    """The call with metas in its tensors' places, and their layouts."""
    layouts: list[Layout] = []
    metas: list[Meta] = []

    def describe(tensor: Any) -> Meta:
        own = tensor._tensor_layout
        layouts.append(own.layout)
        meta = Meta(len(metas), tuple(own.shape), tuple(own.stride), own.dtype)
        metas.append(meta)
        return meta

    meta_args = map_tensors(describe, args)
    meta_kwargs = map_tensors(describe, kwargs) if kwargs else kwargs
    call = OpCall(func, meta_args, meta_kwargs, tuple(metas))
    call.outputs = rule.out_meta(call) if rule.out_meta is not None else run_on_meta(call)
    return call, tuple(layouts)


def view_strides(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[int, ...], ...]:
    """The global strides of the views that an op gives, as of plain tensors: contiguous() and reshape() copy a view or
    not by these. Of a view that plain tensors can't have, none."""
    own = args[0]._tensor_layout
    base = Meta(0, tuple(own.shape), tuple(own.stride), own.dtype)
    try:
        return tuple([out.stride for out in run_on_meta(OpCall(func, (base, *args[1:]), kwargs, (base,)))])
    except RuntimeError:
        return ()


@dataclass(frozen=True, slots=True)
class LocalForm:
    """What a rank calls: `call` with the op's own arguments, or with `static` ones, metas in the places of tensors."""

    call: Callable[..., Any]
    static: tuple[tuple[Any, ...], dict[str, Any]] | None = None


def local_form(
    func: OpOverload, facts: OpFacts, rule: Rule, call: OpCall, choice: Choice, comm: MeshComm
) -> LocalForm | None:
    """The local call of a choice; None for an in-place op whose target can't be written where it is."""
    if facts.functional is not None and call.outputs[0].shape != call.tensors[0].shape:
        return None
    form = _local_form(func, facts, rule, call, choice, comm)
    if form is not None and facts.is_view and pends_more(choice.inputs, choice.outputs):
        return LocalForm(_copying(form.call), form.static)  # a term is no part of the input's memory
    return form


def _local_form(
    func: OpOverload, facts: OpFacts, rule: Rule, call: OpCall, choice: Choice, comm: MeshComm
) -> LocalForm | None:
    local_call: Callable[..., Any] = func
    static = None
    if rule.local_args is not None or rule.local_op is not None:
        view = _local_view(call, choice, comm.coordinate)
        if rule.local_op is not None:
            local_call = rule.local_op(call, view) or func
            views = (_local_view(call, choice, where) for where in comm.shape.coordinates())
            if facts.functional is not None and any(rule.local_op(call, v) for v in views):
                return None  # on every rank alike, also on one that would call the op itself
        if rule.local_args is not None:
            given = (call.args, dict(call.kwargs))
            static = rule.local_args(call, view)
            if _equal(static, given):
                static = None
            elif _leads(static) and _leads(given):
                return LocalForm(_with_static(local_call, static[0][1:]))
    return LocalForm(quick_call(local_call) if isinstance(local_call, OpOverload) else local_call, static)


def _leads(static: tuple[tuple[Any, ...], dict[str, Any]]) -> bool:
    """Whether the arguments are one tensor followed by other values, and no keywords."""
    args, kwargs = static
    rest = [m for a in args[1:] for m in (a if isinstance(a, (list, tuple)) else [a])]
    return not kwargs and isinstance(args[0], Meta) and not any(isinstance(m, Meta) for m in rest)


def _with_static(op: Callable[..., Any], rest: tuple[Any, ...]) -> Callable[..., Any]:
    """A call on one local part whose other arguments are this rank's, not the given ones."""
    call = quick_call(op) if isinstance(op, OpOverload) else op
    return lambda part, *given: call(part, *rest)


def _copying(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: map_tensors(torch.clone, call(*args, **kwargs))


def pends_more(inputs: tuple[Layout, ...], outputs: tuple[Layout, ...]) -> bool:
    """Whether outputs have a pending reduction that the inputs don't: their parts are new."""
    before = {a for layout in inputs for a in layout.partial_axes}
    return any(a not in before for layout in outputs for a in layout.partial_axes)


def _equal(a: Any, b: Any) -> bool:
    """Equal arguments, a list being as good as a tuple."""
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(_equal, a, b))
    return type(a) is type(b) and a == b


def _local_view(call: OpCall, choice: Choice, where: Coordinate) -> LocalView:
    given: list[tuple[Any, Any]] = [(y, m.shape) for y, m in zip(choice.inputs, call.tensors, strict=True)]
    made: list[tuple[Any, Any]] = [(y, m.shape) for y, m in zip(choice.outputs, call.outputs, strict=True)]
    return LocalView(
        input_shapes=tuple([y.local_shape(shape, where) for y, shape in given]),
        input_offsets=tuple([y.local_offset(shape, where) for y, shape in given]),
        output_shapes=tuple([y.local_shape(shape, where) for y, shape in made]),
    )
