"""Make the plan of an op on DTensors: from its rule, from its family's code, or by decomposing it.

    rule     choose layouts, redistribute what has to be, one local call
    family   code of its own that writes the steps (tensor/ops), on a Planner
    neither  its decomposition, planned op by op; failing that, whole tensors on every rank

Pure: nothing is sent, and every rank makes the same plan from the same call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from longmesh._torch import OpOverload, no_dispatch_modes, schema_of
from longmesh.comm import comm_anywhere
from longmesh.errors import LongmeshError
from longmesh.rules import Rule, find_rule
from longmesh.spec.strides import contiguous_stride
from longmesh.tensor.by_rule import describe_call, local_form, pends_more, view_strides
from longmesh.tensor.dtensor import DTensor
from longmesh.tensor.mask_buffer import without_mask
from longmesh.tensor.one_by_one import plan_one_by_one, plan_through_views
from longmesh.tensor.op_facts import OpFacts, decomposition_of, facts_of, written_arguments
from longmesh.tensor.op_plan import OpPlan, Output
from longmesh.tensor.plain import common_mesh
from longmesh.tensor.planned import Unplannable
from longmesh.tensor.planner import USUAL, Planner, slots_for_metas
from longmesh.tensor.propagate import Choice, choose
from longmesh.tensor.sending_steps import Redistribute
from longmesh.tensor.steps import GivenCall, LocalCall, Step
from longmesh.tensor.tensor_layout import TensorLayout
from longmesh.tensor.tree import all_tensors, map_tensors

Family = Callable[[Planner, OpOverload, tuple[Any, ...], dict[str, Any]], Any]

# A copy of a pending lookup is pending, too: its mask is not applied first.
COPIES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.clone.default)


class Recipe(NamedTuple):
    """How an op runs whatever the sizes: of a rule that doesn't read them, where no input has to move. `model`: the
    plan of the call that it was made for. Where the local call is the op itself, others differ in their outputs alone.
    """

    func: OpOverload
    facts: OpFacts
    rule: Rule
    choice: Choice
    model: OpPlan

    def plan(self, args: tuple[Any, ...], kwargs: dict[str, Any], lead: TensorLayout) -> OpPlan | None:
        """The plan of a call with other sizes; None where an in-place op can't write there."""
        rule, model, choice = self.rule, self.model, self.choice
        call, _ = describe_call(self.facts.functional or self.func, rule, args, kwargs)
        outputs = _outputs(lead, choice, call.outputs, model.is_view)
        if rule.local_args is None and rule.local_op is None and model.written is None:
            single = None if model.single is None else outputs[0]
            kept = (model.plain, None, False, model.is_view, model.is_copy)
            return OpPlan(model.steps, outputs, None, model.num_slots, (), single, *kept)
        return _by_rule(self.func, self.facts, rule, call, choice, lead, list(choice.inputs))


class PlanMaker:
    """The ops that are planned by code of their own, and those warned of."""

    def __init__(self) -> None:
        self.families: dict[OpOverload, Family] = {}
        # Families that take plain tensors beside DTensors, and DTensors of several meshes.
        self.mixed: dict[OpOverload, Family] = {}
        self.warned: set[str] = set()

    def make(
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
            _refuse_overlap(func, args, kwargs)
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

    def make_of(self, build: Callable[..., Any], static: tuple[Any, ...], tensors: Sequence[Any]) -> OpPlan:
        """The plan of several ops that `build(planner, *static, *tensors)` writes, as a family does."""
        first: Any = next(t for t in tensors if t is not None)
        planner = Planner(first._tensor_layout.comm, first.device, self.families, self.warned)
        numbers = iter(range(len(tensors)))
        planned = map_tensors(lambda t: planner.add_input(t, next(numbers)), list(tensors))
        with no_dispatch_modes(), torch.no_grad():
            result = build(planner, *static, *planned)
        strides = [contiguous_stride(t.shape) for t in all_tensors(result)]
        return planner.plan(None, result, "several ops", strides)

    def _by_rule(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[OpPlan, Recipe | None, bool] | None:
        """The plan of a call of DTensors that a rule covers, without a planner."""
        facts = facts_of(func)
        rule = find_rule(facts.rule_name)
        if rule is None or facts.has_out:
            return None
        lead = dtensors_of(args, kwargs)[0]._tensor_layout
        call, layouts = describe_call(facts.functional or func, rule, args, kwargs)
        pinned = None if facts.functional is None else 0
        choice = choose(call, rule.axis_rules(call), layouts, lead.comm.cluster, pinned)
        if choice is None:
            return None
        plan = _by_rule(func, facts, rule, call, choice, lead, list(layouts), dtensors_of(args, kwargs))
        if plan is None:
            return None
        by_value = plan.plain is None
        if rule.reads_sizes or choice.inputs != layouts or any(entry.even for entry in choice.lines):
            return plan, None, by_value
        return plan, Recipe(func, facts, rule, choice, plan), by_value


# Writing the same value to one place several times is writing it once; parts of a pending reduction hold other values.
_IDEMPOTENT = ("aten::fill_", "aten::zero_")


def _refuse_overlap(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise for a write to an expanded tensor, as plain torch does, whose check sees a rank's own part only: of one row
    or none it would pass."""
    if torch.Tag.inplace_view in func.tags:
        return
    for tensor in all_tensors(written_arguments(func, args, kwargs)):
        if not isinstance(tensor, DTensor) or not tensor._tensor_layout.is_expanded:
            continue
        if schema_of(func).name not in _IDEMPOTENT or tensor._layout.partial_axes:
            raise LongmeshError(
                f"{func} writes to an expanded tensor of shape {tuple(tensor.shape)} and stride {tensor.stride()}: "
                "several of its elements are one place in memory; clone() it first"
            )


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
    is_view = facts.functional is None and facts.is_view
    outputs = _outputs(lead, choice, call.outputs, is_view)
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
        is_view=is_view,
        is_copy=facts.is_copied_view or not stays or pends_more(choice.inputs, choice.outputs),
    )


def _outputs(lead: TensorLayout, choice: Choice, metas: tuple[Any, ...], is_view: bool) -> tuple[Output, ...]:
    pairs = zip(choice.outputs, metas, strict=True)
    return tuple(
        [Output(lead.mesh, layout, meta.shape, meta.stride, is_alias=is_view) for layout, meta in pairs]
    )


def dtensors_of(args: Any, kwargs: Any) -> list[Any]:
    """The DTensors of a call."""
    return [t for t in all_tensors((args, kwargs)) if isinstance(t, DTensor)]
