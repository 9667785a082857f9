"""Run an aten op on DTensors: find its plan, run it.

    y = x + w  ->  key: the op, how x and w are laid out, the other arguments
               ->  OpPlan: the steps that make y

Plans are kept by the TensorLayout of the call's first DTensor. The key is the op and its arguments in order, a tensor's
TensorLayout in its place (op_key.py). A pointwise op's plan holds for any float; where it does not (a reduction is
pending), BY_VALUE stands there and the plan is found under the key with the floats. A Recipe stands under the key with
`TensorLayout.kind` in the places of layouts: it makes the plans of calls that differ in sizes alone.

A plan that is made anew is, too, what every other rank has: making it depends on nothing but the key.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from longmesh._torch import (
    OpOverload,
    dispatch_mode_count,
    increment_version,
    make_wrapper,
    no_dispatch_modes,
    schema_of,
)
from longmesh.comm import comm_anywhere
from longmesh.rules import Rule, find_rule
from longmesh.tensor.by_rule import describe_call, local_form, pends_more, view_strides
from longmesh.tensor.direct import no_active_modes
from longmesh.tensor.dtensor import DTensor, Factor
from longmesh.tensor.mask_buffer import without_mask
from longmesh.tensor.one_by_one import plan_one_by_one, plan_through_views
from longmesh.tensor.op_facts import (
    OpFacts,
    decomposition_of,
    facts_of,
    is_pointwise,
    written_arguments,
)
from longmesh.tensor.op_key import describe, describe_named, exact_key
from longmesh.tensor.op_plan import OpPlan, Output, execute, finish, wrap
from longmesh.tensor.outside import is_split, plan_outside, run_split
from longmesh.tensor.overlap import refuse_overlap
from longmesh.tensor.plain import common_mesh, replicate_plain, value_of, writes_plain
from longmesh.tensor.planner import USUAL, Planner, Unplannable, slots_for_metas
from longmesh.tensor.propagate import Choice, choose
from longmesh.tensor.sending_steps import Redistribute
from longmesh.tensor.steps import GivenCall, LocalCall, Step
from longmesh.tensor.tensor_layout import TensorLayout, tensor_layout
from longmesh.tensor.tree import all_tensors, map_tensors

Family = Callable[[Planner, OpOverload, tuple[Any, ...], dict[str, Any]], Any]
# What a plan depends on beyond the key, hashable; asked before anything else.
Note = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]

# A copy of a pending lookup is pending, too: its mask is not applied first.
COPIES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.clone.default)

# More plans of one layout than this are no working set: sizes that never come back.
_MAX_PLANS = 1 << 12
# Stands for a plan that depends on the values of floats: it is found under the key that has them.
BY_VALUE = object()


class OpTable:
    """What is known of one op. `reads_floats`: whether its plans depend on the values of floats."""

    __slots__ = ("func", "note", "reads_floats", "writes", "writes_lists")

    def __init__(self, func: OpOverload, note: Note | None) -> None:
        self.func = func
        self.note = note
        self.reads_floats = not is_pointwise(func)
        self.writes = schema_of(func).is_mutable
        self.writes_lists = self.writes and schema_of(func).name.startswith(
            ("aten::_foreach_", "aten::_fused_")
        )


class Recipe:
    """How an op runs whatever the sizes: of a rule that doesn't read them, where no input has to move."""

    __slots__ = ("choice", "facts", "func", "model", "rule")

    def __init__(self, func: OpOverload, facts: OpFacts, rule: Rule, choice: Choice, model: OpPlan) -> None:
        self.func = func
        self.facts = facts
        self.rule = rule
        self.choice = choice
        # Of the call that it was made for. Where the local call is the op itself, others differ in their outputs alone.
        self.model = model

    def plan(self, args: tuple[Any, ...], kwargs: dict[str, Any], lead: TensorLayout) -> OpPlan | None:
        """The plan of a call with other sizes; None where an in-place op can't write there."""
        rule, model, choice = self.rule, self.model, self.choice
        call, _ = describe_call(self.facts.functional or self.func, rule, args, kwargs)
        outputs = _outputs(lead, choice, call.outputs)
        if rule.local_args is None and rule.local_op is None and model.written is None:
            single = None if model.single is None else outputs[0]
            kept = (model.plain, None, False, model.is_view, model.is_copy)
            return OpPlan(model.steps, outputs, None, model.num_slots, (), single, *kept)
        return _by_rule(self.func, self.facts, rule, call, choice, lead, list(choice.inputs))


class Dispatcher:
    """The ops seen so far, the ops that are planned by code of their own, and the ops warned of."""

    def __init__(self) -> None:
        self.tables: dict[int, OpTable] = {}
        self.families: dict[OpOverload, Family] = {}
        self.notes: dict[OpOverload, Note] = {}
        # Families that take plain tensors beside DTensors, and DTensors of several meshes.
        self.mixed: dict[OpOverload, Family] = {}
        self.warned: set[str] = set()

    def from_torch(
        self,
        func: OpOverload,
        types: Sequence[type] = (),
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """`__torch_dispatch__` of DTensors: torch calls this, with nothing in between."""
        table = self.tables.get(id(func)) or self._table(func)
        # Written out, since every op comes through here: what `execute` does for a plan that is one local call.
        parts: list[Any] = [table]
        local_args: list[Any] = []
        for value in args:
            if isinstance(value, DTensor):
                parts.append(value._tensor_layout)
                local_args.append(value._local_tensor)
            else:
                local_args.append(describe(value, parts, table.reads_floats))
        local_kwargs = describe_named(kwargs, parts, table.reads_floats) if kwargs else None
        key = tuple(parts)
        lead = parts[1]
        if type(lead) is not TensorLayout:
            lead = _lead_of(parts)
        if table.writes:
            _count_writes(table, lead, args, kwargs or {})
        try:
            plan = lead.plans.get(key)
        except TypeError:  # symbolic sizes don't hash
            plan = key = None
        if type(plan) is not OpPlan:
            return self._first_time(table, lead, key, args, kwargs or {})
        call = plan.plain
        if call is None:
            return self._run(plan, func, args, kwargs or {})
        local = call(*local_args, **local_kwargs) if local_kwargs else call(*local_args)
        output = plan.single
        if plan.written is not None:
            return args[plan.written]
        if output is None or output.known is None:
            return finish(plan, local, func, args, kwargs or {})
        if plan.is_view and (plan.is_copy or torch.is_inference_mode_enabled()):
            return finish(plan, local, func, args, kwargs or {})
        known = output.known
        if known.dtype is not local.dtype:
            known = tensor_layout(known.mesh, known.layout, known.shape, known.stride, local.dtype)
        kind = Factor if known.is_sharded_inside else DTensor
        result = make_wrapper(
            kind, known.shape, known.face_stride, None, None, known.dtype, torch.strided, local.device
        )  # fmt: skip
        result._local_tensor = local
        result._tensor_layout = known
        return result

    def __call__(self, func: OpOverload, *args: Any) -> Any:
        """An op on DTensors, as from torch."""
        return self.from_torch(func, (), args)

    def _table(self, func: OpOverload) -> OpTable:
        table = self.tables[id(func)] = OpTable(func, self.notes.get(func))
        return table

    def forget_plans(self) -> None:
        """Forget every plan, since a rule or a family has changed: their keys have the old tables."""
        self.tables.clear()

    def run_known(self, func: OpOverload, key: tuple[Any, ...], parts: tuple[Any, ...]) -> DTensor | None:
        """The op on local parts, if its plan is known and plain, and no mode would see it."""
        table = self.tables.get(id(func))
        plan = key[0].plans.get((table, *key)) if table is not None else None
        if type(plan) is not OpPlan or plan.plain is None or plan.single is None or plan.is_view:
            return None
        return wrap(plan.plain(*parts), plan.single) if no_active_modes() else None

    def write_known(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Do as `run_known` for an op that writes to its first argument; False where it was not done."""
        table = self.tables.get(id(func))
        if table is None or not no_active_modes() or torch.is_inference_mode_enabled():
            return False
        parts: list[Any] = [table]
        local_args = [describe(value, parts, table.reads_floats) for value in args]
        local_kwargs = describe_named(kwargs, parts, table.reads_floats) if kwargs else {}
        try:
            plan = args[0]._tensor_layout.plans.get(tuple(parts))
        except TypeError:  # symbolic sizes don't hash
            return False
        if type(plan) is not OpPlan or plan.plain is None or plan.written != 0:
            return False
        plan.plain(*local_args, **local_kwargs)
        increment_version([args[0]])
        return True

    def _first_time(
        self,
        table: OpTable,
        lead: TensorLayout,
        key: tuple[Any, ...] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """A call whose like was not seen."""
        func = table.func
        note = None if table.note is None else (table.note(func, args, kwargs),)
        plain = [t for t in all_tensors((args, kwargs)) if not isinstance(t, DTensor)]
        is_mixed = func in self.mixed
        if is_mixed and is_split(args, kwargs):
            return run_split(self.from_torch, func, args, kwargs)
        if plain and not is_mixed and schema_of(func).is_mutable and writes_plain(func, args, kwargs):
            args, kwargs = map_tensors(value_of, (args, kwargs))
            return func(*args, **kwargs)
        if not is_mixed and any(t.ndim for t in plain):
            args, kwargs = replicate_plain(func, args, kwargs)
            if note is None:
                return self.from_torch(func, (), args, kwargs)
            key = _key(table, args, kwargs)
        return self._run(self._find(table, lead, key, args, kwargs, note), func, args, kwargs)

    def _run(self, plan: OpPlan, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if plan.needs_values and dispatch_mode_count():
            plan = self._make(func, args, kwargs, is_traced=True)[0]
        return execute(plan, func, args, kwargs)

    def _find(
        self,
        table: OpTable,
        lead: TensorLayout,
        key: tuple[Any, ...] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        note: tuple[Any] | None = None,
    ) -> OpPlan:
        """The plan of a call, made where it is not known. With a note it is kept under key and note."""
        if note is not None and key is not None:
            key = (*key, *note)
        found = None if key is None else lead.plans.get(key)
        if found is BY_VALUE:
            key = (table, *exact_key(args, kwargs))
            found = lead.plans.get(key)
        if type(found) is OpPlan:
            return found
        layouts = [t._tensor_layout for t in all_tensors_of(args, kwargs)]
        is_symbolic = any(own.is_symbolic for own in layouts)
        kinds: tuple[Any, ...] | None = None
        plan = None
        if key is not None and not is_symbolic:
            kinds = tuple([p.kind if type(p) is TensorLayout else p for p in key])
            recipe = lead.kind.recipes.get(kinds)
            plan = None if recipe is None else recipe.plan(args, kwargs, lead)
        if plan is None:
            is_traced = dispatch_mode_count() > 0
            plan, recipe, by_value = self._make(
                table.func, args, kwargs, is_traced=is_traced, note=None if note is None else note[0]
            )
            by_value = by_value or any(own.layout.partial_axes for own in layouts)
            if not lead.comm.is_member:
                recipe = None
            if is_symbolic or key is None or (is_traced and plan.needs_values):
                return plan
            if recipe is not None and kinds is not None:
                _keep(lead.kind.recipes, kinds, recipe)
            if by_value and not table.reads_floats:
                exact = (table, *exact_key(args, kwargs))
                if exact != key:
                    _put(lead, key, BY_VALUE)
                    key = exact
        if not lead.comm.is_member:
            plan = plan_outside(plan, table.func, args, kwargs)
        _put(lead, key, plan)
        return plan

    def plan_of(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpPlan | None:
        """The plan that a call would run by; None of one that has none: it writes scalars to a plain tensor."""
        table = self.tables.get(id(func)) or self._table(func)
        note = None if table.note is None else (table.note(func, args, kwargs),)
        plain = [t for t in all_tensors((args, kwargs)) if not isinstance(t, DTensor)]
        is_mixed = func in self.mixed
        if plain and not is_mixed and schema_of(func).is_mutable and writes_plain(func, args, kwargs):
            return None
        if not is_mixed and any(t.ndim for t in plain):
            args, kwargs = replicate_plain(func, args, kwargs)
        lead = all_tensors_of(args, kwargs)[0]._tensor_layout
        return self._find(table, lead, _key(table, args, kwargs), args, kwargs, note)

    # -- making a plan ---------------------------------------------------------------------------

    def _make(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_traced: bool,
        note: Any = None,
    ) -> tuple[OpPlan, Recipe | None, bool]:
        """A plan, how to plan others like it, if known, and whether it holds for these floats only."""
        tensors = all_tensors((args, kwargs))
        if schema_of(func).is_mutable:
            refuse_overlap(func, args, kwargs)
        if facts_of(func).is_composite_view:
            return plan_one_by_one(func), None, True
        if any(isinstance(t, DTensor) and t._tensor_layout.is_copied_view for t in tensors):
            return plan_through_views(func), None, False
        family = self.mixed.get(func) or self.families.get(func)
        is_simple = _are_simple(tensors)
        made = self._by_rule(func, args, kwargs) if is_simple and family is None else None
        if made is not None:
            return made
        mesh = common_mesh(args, kwargs)
        planner = Planner(comm_anywhere(mesh), tensors[0].device, self.families, self.warned)
        planner.is_traced, planner.note = is_traced, note
        numbers = iter(range(len(tensors)))
        planned = map_tensors(lambda t: planner.add_input(t, next(numbers)), (args, kwargs))
        try:
            with no_dispatch_modes(), torch.no_grad():
                if family is not None:
                    ready = planned
                    if func not in COPIES:
                        make_ready = planner.unmasked if func in self.mixed else planner.ready_input
                        ready = map_tensors(make_ready, planned)
                    planner.depth = 1
                    result = family(planner, func, *ready)
                    if type(result) is OpPlan:
                        return result, None, False
                    made = self._by_rule(func, args, kwargs) if is_simple and result is USUAL else None
                    if made is not None:
                        return made
                    if result is USUAL:
                        result = planner.by_rule(func, *ready)
                    planner.depth = 0
                else:
                    result = planner.op(func, *planned)
        except Unplannable:
            return plan_one_by_one(func), None, True
        strides = view_strides(func, args, kwargs) if facts_of(func).is_view else ()
        return planner.plan(func, result, _how(func, family), strides), None, True

    def _by_rule(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[OpPlan, Recipe | None, bool] | None:
        """The plan of a call of DTensors that a rule covers, without a planner."""
        facts = facts_of(func)
        rule = find_rule(facts.rule_name)
        if rule is None or facts.has_out:
            return None
        lead = all_tensors_of(args, kwargs)[0]._tensor_layout
        call, layouts = describe_call(facts.functional or func, rule, args, kwargs)
        choice = choose(call, rule.axis_rules(call), layouts, None if facts.functional is None else 0)
        if choice is None:
            return None
        plan = _by_rule(func, facts, rule, call, choice, lead, list(layouts), all_tensors_of(args, kwargs))
        if plan is None:
            return None
        by_value = plan.plain is None
        if rule.reads_sizes or choice.inputs != layouts or any(entry.even for entry in choice.lines):
            return plan, None, by_value
        return plan, Recipe(func, facts, rule, choice, plan), by_value


def _count_writes(table: OpTable, lead: TensorLayout, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Count the writes that torch does not: in inference mode, and of subclasses in lists of tensors."""
    if torch.is_inference_mode_enabled():
        lead.comm.num_writes += 1
    if table.writes_lists:
        written = {id(t): t for t in all_tensors(written_arguments(table.func, args, kwargs))}
        increment_version([t for t in written.values() if not t.is_inference()])


def _are_simple(tensors: list[Any]) -> bool:
    """Whether all are DTensors on one mesh, with no mask to apply and no reduced value to recall."""
    if not isinstance(tensors[0], DTensor):
        return False
    comm = tensors[0]._tensor_layout.comm
    return all(
        isinstance(t, DTensor)
        and t._tensor_layout.comm is comm
        and not t._tensor_layout.has_lookup
        and t._tensor_layout.reduced is None
        for t in tensors
    )


def _how(func: OpOverload, family: Family | None) -> str:
    if family is not None:
        return "rule of its family"
    facts = facts_of(func)
    if find_rule(facts.rule_name) is not None:
        return "rule"
    if facts.functional is not None or decomposition_of(func) is not None:
        return "no rule: made of other ops"
    return "no rule: its inputs were replicated"


def _by_rule(
    func: OpOverload,
    facts: OpFacts,
    rule: Rule,
    call: Any,
    choice: Choice,
    lead: TensorLayout,
    layouts: list[Any],
    tensors: Sequence[Any] = (),
) -> OpPlan | None:
    """Redistribute what has to be, and one local call."""
    form = local_form(func, facts, rule, call, choice, lead.comm)
    if form is None:
        return None
    outputs = _outputs(lead, choice, call.outputs)
    steps: list[Step] = []
    slots = list(range(len(layouts)))
    for number, (have, want) in enumerate(zip(layouts, choice.inputs, strict=True)):
        if have is not want:
            slots[number] = len(layouts) + len(steps)
            steps.append(Redistribute(number, slots[number], tensors[number]._tensor_layout, want, number))
    out = len(layouts) + len(steps)
    stays = not steps
    if form.static is None:
        steps.append(GivenCall(form.call, tuple(slots), out))
    else:
        args, kwargs = slots_for_metas(form.static, slots)
        steps.append(LocalCall(form.call, args, kwargs, out))
    has_lookup = any(without_mask(y) is not y for y in choice.outputs)
    return OpPlan(
        steps=tuple(steps),
        outputs=outputs,
        num_slots=out + 1,
        single=outputs[0] if len(outputs) == 1 and facts.returns_one_tensor else None,
        plain=form.call if stays and form.static is None and not has_lookup else None,
        written=0 if facts.functional is not None else None,
        is_view=facts.functional is None and facts.is_view,
        is_copy=not stays or pends_more(choice.inputs, choice.outputs),
    )


def _outputs(lead: TensorLayout, choice: Choice, metas: tuple[Any, ...]) -> tuple[Output, ...]:
    pairs = zip(choice.outputs, metas, strict=True)
    return tuple([Output(lead.mesh, layout, meta.shape, meta.stride) for layout, meta in pairs])


def all_tensors_of(args: Any, kwargs: Any) -> list[Any]:
    """The DTensors of a call."""
    return [t for t in all_tensors((args, kwargs)) if isinstance(t, DTensor)]


def _key(table: OpTable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    key = (table, *exact_key(args, kwargs, table.reads_floats))
    try:
        hash(key)
    except TypeError:  # symbolic sizes don't hash
        return None
    return key


def _lead_of(parts: list[Any]) -> TensorLayout:
    return next(p for p in parts if type(p) is TensorLayout)


def _put(lead: TensorLayout, key: tuple[Any, ...] | None, plan: Any) -> None:
    if key is not None:
        _keep(lead.plans, key, plan)


def _keep(known: dict[tuple[Any, ...], Any], key: tuple[Any, ...], value: Any) -> None:
    if len(known) >= _MAX_PLANS:
        known.clear()
    with contextlib.suppress(TypeError):  # symbolic sizes don't hash
        known[key] = value


dispatch = Dispatcher()
