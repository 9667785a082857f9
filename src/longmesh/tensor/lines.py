"""From the lines of a rule to a plan: the layouts that a call takes and gives, and what each rank runs.

Pure: every rank makes the same choice from the same call; only the local call's own arguments may differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from longmesh._torch import OpOverload
from longmesh.comm import Place
from longmesh.rules import LocalView, Meta, OpCall, Rule
from longmesh.rules.op_facts import OpFacts, facts_of, quick_call, run_on_meta
from longmesh.rules.steps import GivenCall, LocalCall, Redistribute, Slot, Step
from longmesh.rules.tree import all_tensors, map_tensors
from longmesh.spec import Coordinate, Layout, MaskPartial
from longmesh.tensor.op_plan import OpPlan, Output
from longmesh.tensor.propagate import Choice, choose


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


class Lines(NamedTuple):
    """The chosen lines of a rule for a call, and what a rank calls: `call` with the op's own arguments, or with
    `static` ones, metas in the places of tensors."""

    op_call: OpCall
    layouts: tuple[Layout, ...]
    choice: Choice
    call: Callable[..., Any]
    static: tuple[tuple[Any, ...], dict[str, Any]] | None = None


def find_lines(
    func: OpOverload, facts: OpFacts, rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any], comm: Any
) -> Lines | None:
    """The cheapest valid lines of a rule for a call; None for an in-place op whose target can't be written where it
    is."""
    assert rule.axis_rules is not None, "it has lines"
    call, layouts = describe_call(facts.functional or func, rule, args, kwargs)
    pinned = None if facts.functional is None else 0
    choice = choose(call, rule.axis_rules(call), layouts, comm.cluster, pinned)
    return None if choice is None else local_form(func, facts, rule, call, layouts, choice, comm)


def local_form(
    func: OpOverload,
    facts: OpFacts,
    rule: Rule,
    call: OpCall,
    layouts: tuple[Layout, ...],
    choice: Choice,
    comm: Any,
) -> Lines | None:
    """The local call of a choice; None as in `find_lines`."""
    if facts.functional is not None and call.outputs[0].shape != call.tensors[0].shape:
        return None
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
            static = rule.local_args(call, view)
            static = None if _equal(static, (call.args, dict(call.kwargs))) else static
    local_call = quick_call(local_call) if isinstance(local_call, OpOverload) else local_call
    if static is not None and _leads(static) and _leads((call.args, dict(call.kwargs))):
        local_call, static = OnPart(local_call, static[0][1:]), None
    if facts.is_view and pends_more(choice):
        local_call = Copying(local_call)  # a term is no part of the input's memory
    return Lines(call, layouts, choice, local_call, static)


class OnPart(NamedTuple):
    """A call on one local part whose other arguments are this rank's, not the given ones."""

    call: Callable[..., Any]
    rest: tuple[Any, ...]

    def __call__(self, part: torch.Tensor, *given: Any) -> Any:
        return self.call(part, *self.rest)


class Copying(NamedTuple):
    """A call whose results are copied."""

    call: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return map_tensors(torch.clone, self.call(*args, **kwargs))


def _leads(static: tuple[tuple[Any, ...], dict[str, Any]]) -> bool:
    """Whether the arguments are one tensor followed by other values, and no keywords."""
    args, kwargs = static
    rest = [m for a in args[1:] for m in (a if isinstance(a, (list, tuple)) else [a])]
    return not kwargs and isinstance(args[0], Meta) and not any(isinstance(m, Meta) for m in rest)


def pends_more(choice: Choice) -> bool:
    """Whether outputs have a pending reduction that the inputs don't: their parts are new."""
    before = {a for layout in choice.inputs for a in layout.partial_axes}
    return any(a not in before for layout in choice.outputs for a in layout.partial_axes)


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


def slots_for_metas(value: Any, slots: list[int]) -> Any:
    """Arguments with slots in the places of metas."""
    if isinstance(value, Meta):
        return Slot(slots[value.index])
    if isinstance(value, (list, tuple)):
        return type(value)(slots_for_metas(v, slots) for v in value)
    return {k: slots_for_metas(v, slots) for k, v in value.items()} if isinstance(value, dict) else value


def plan_call(
    func: OpOverload, rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any], comm: Any
) -> tuple[OpPlan, Recipe | None] | None:
    """The plan of a call of tensors on one mesh by the lines of its rule, and how to plan calls of other sizes, if that
    is known. None where an in-place op can't write there."""
    facts = facts_of(func)
    lines = find_lines(func, facts, rule, args, kwargs, comm)
    if lines is None:
        return None
    slots, moves = list(range(len(lines.layouts))), list[Step]()
    if lines.choice.inputs != lines.layouts:
        tensors: list[Any] = all_tensors((args, kwargs))
        for number, (have, want) in enumerate(zip(lines.layouts, lines.choice.inputs, strict=True)):
            if have is not want:
                own, slots[number] = tensors[number]._tensor_layout, len(lines.layouts) + len(moves)
                what = (have, want, tuple(own.shape), own.dtype, number)
                moves.append(Redistribute(number, slots[number], *what))
    plan = plan_lines(facts, lines, comm.place, moves, slots)
    is_open = not (rule.reads_sizes or moves or any(entry.even for entry in lines.choice.lines))
    return plan, Recipe(func, facts, rule, lines.choice, plan) if is_open else None


def plan_lines(facts: OpFacts, lines: Lines, place: Place, moves: list[Step], slots: list[int]) -> OpPlan:
    """The plan of a call that is its lines: `moves` of inputs, which are then in `slots`, and one local call."""
    out = len(slots) + len(moves)
    if lines.static is None:
        last: Step = GivenCall(lines.call, tuple(slots), out)
    else:
        args, kwargs = slots_for_metas(lines.static, slots)
        last = LocalCall(lines.call, args, kwargs, out)
    is_view = facts.functional is None and facts.is_view
    has_lookup = any(MaskPartial in map(type, y.placements) for y in lines.choice.outputs)
    return OpPlan(
        steps=(*moves, last),
        places=(place,),
        outputs=outputs_of(lines.op_call, lines.choice, is_view),
        num_slots=out + 1,
        is_single=len(lines.choice.outputs) == 1 and facts.returns_one_tensor,
        plain=lines.call if not moves and lines.static is None and not has_lookup else None,
        written=0 if facts.functional is not None else None,
        is_view=is_view,
        is_copy=facts.is_copied_view or bool(moves) or pends_more(lines.choice),
    )


def outputs_of(call: OpCall, choice: Choice, is_alias: bool) -> tuple[Output, ...]:
    pairs = zip(choice.outputs, call.outputs, strict=True)
    return tuple([Output(layout, meta.shape, meta.stride, -1, None, is_alias) for layout, meta in pairs])


class Recipe(NamedTuple):
    """A plan whose sizes are open: of a rule that doesn't read them, where no input has to move."""

    func: OpOverload
    facts: OpFacts
    rule: Rule
    choice: Choice
    model: OpPlan

    def plan(self, args: tuple[Any, ...], kwargs: dict[str, Any], comm: Any) -> OpPlan | None:
        """The plan with the sizes of a call; None where an in-place op can't write there."""
        rule, choice, model = self.rule, self.choice, self.model
        call, layouts = describe_call(self.facts.functional or self.func, rule, args, kwargs)
        if rule.local_args is None and rule.local_op is None and model.written is None:
            outputs = outputs_of(call, choice, model.is_view)
            kept = (
                model.num_slots,
                (),
                model.is_single,
                model.plain,
                None,
                False,
                model.is_view,
                model.is_copy,
            )
            return OpPlan(model.steps, model.places, outputs, None, *kept)
        lines = local_form(self.func, self.facts, rule, call, layouts, choice, comm)
        slots = list(range(len(layouts)))
        return None if lines is None else plan_lines(self.facts, lines, comm.place, [], slots)
