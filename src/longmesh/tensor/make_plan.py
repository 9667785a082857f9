"""Make the plan of a call on DTensors: by its op's rule, by decomposing it, or on whole tensors (planner.py).

Pure: nothing is sent, and every rank makes the same plan from the same call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from longmesh._torch import OpOverload, no_dispatch_modes, schema_of
from longmesh.errors import LongmeshError
from longmesh.rules import Rule
from longmesh.rules.op_facts import decomposition_of, facts_of, written_arguments
from longmesh.rules.planned import Planned, Unplannable
from longmesh.rules.table import program_of, rule_of
from longmesh.rules.tree import all_tensors, map_tensors
from longmesh.spec.strides import contiguous_stride
from longmesh.tensor.dtensor import DTensor
from longmesh.tensor.lines import Recipe, plan_call, view_strides
from longmesh.tensor.one_by_one import plan_one_by_one, plan_through_views
from longmesh.tensor.op_plan import OpPlan
from longmesh.tensor.planner import Planner


def make_plan(
    func: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    comm: Any,
    *,
    warned: set[str],
    is_traced: bool = False,
    note: Any = None,
) -> tuple[OpPlan, Sequence[Any], Recipe | None, bool]:
    """The plan of a call that runs on the mesh of `comm`, the comms of its meshes, how to plan calls of other sizes, if
    that is known, and whether it holds for these floats only."""
    tensors: list[Any] = all_tensors((args, kwargs))
    facts, rule, program = facts_of(func), rule_of(func), program_of(func)
    if schema_of(func).is_mutable:
        _refuse_overlap(func, args, kwargs)
    if facts.is_composite_view:
        return plan_one_by_one(func, comm.place), (comm,), None, True
    if any(is_laid_out(t) and t._tensor_layout.is_copied_view for t in tensors):
        return plan_through_views(func, comm.place), (comm,), None, False
    is_simple = _are_simple(tensors)
    has_lines = rule is not None and rule.axis_rules is not None and not facts.has_out
    if is_simple and rule is not None and has_lines and (program is None or rule.keeps_lookups):
        made = plan_call(func, rule, args, kwargs, comm)
        if made is not None:
            return made[0], (comm,), made[1], made[0].plain is None
    planner = Planner(comm, tensors[0].device, warned)
    planner.func, planner.is_traced, planner.note = func, is_traced, note
    try:
        with no_dispatch_modes(), torch.no_grad():
            result = _write(planner, func, rule, args, kwargs, is_simple=is_simple)
    except Unplannable:
        return plan_one_by_one(func, comm.place), (comm,), None, True
    if isinstance(result, OpPlan):
        return result, planner.comms, planner.recipe, planner.by_value
    strides = view_strides(func, args, kwargs) if facts.is_view else ()
    return planner.plan(func, result, _how(func, rule), strides), planner.comms, None, True


def _write(
    planner: Planner,
    func: OpOverload,
    rule: Rule | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    is_simple: bool,
) -> Any:
    """The steps of a call, on planned tensors; its result."""
    numbers = iter(range(len(all_tensors((args, kwargs)))))
    planned = map_tensors(lambda t: planner.add_input(t, next(numbers)), (args, kwargs))
    program = program_of(func)
    if program is None or rule is None:
        return planner.op(func, *planned)
    if not rule.keeps_lookups:
        planned = map_tensors(planner.unmasked if rule.mixed else planner.ready_input, planned)
    if is_simple:
        planner.given = planned[0]
    planner.depth = 1
    try:
        return program(planner, func, *planned)
    finally:
        planner.depth = 0


def make_plan_of(
    build: Callable[..., Any], static: tuple[Any, ...], tensors: Sequence[Any], warned: set[str]
) -> tuple[OpPlan, Sequence[Any]]:
    """The plan of several ops that `build(planner, *static, *tensors)` writes, as a program does; and its comms."""
    first: Any = next(t for t in tensors if t is not None)
    planner = Planner(first._tensor_layout.comm, first.device, warned)
    numbers = iter(range(len(tensors)))
    planned = map_tensors(lambda t: planner.add_input(t, next(numbers)), list(tensors))
    with no_dispatch_modes(), torch.no_grad():
        result = build(planner, *static, *planned)
    strides = [contiguous_stride(t.shape) for t in all_tensors(result)]
    return planner.plan(None, result, "several ops", strides), planner.comms


def is_laid_out(tensor: Any) -> bool:
    """Whether it is a DTensor, or stands for one in a plan that no process makes."""
    return isinstance(tensor, (DTensor, Planned))


# Writing the same value to one place several times is writing it once; parts of a pending reduction hold other values.
_IDEMPOTENT = ("aten::fill_", "aten::zero_")


def _refuse_overlap(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise for a write to an expanded tensor, as plain torch does, whose check sees a rank's own part only: of one row
    or none it would pass."""
    if torch.Tag.inplace_view in func.tags:
        return
    tensor: Any
    for tensor in all_tensors(written_arguments(func, args, kwargs)):
        if not is_laid_out(tensor) or not tensor._tensor_layout.is_expanded:
            continue
        if schema_of(func).name not in _IDEMPOTENT or tensor._layout.partial_axes:
            raise LongmeshError(
                f"{func} writes to an expanded tensor of shape {tuple(tensor.shape)} and stride {tensor.stride()}: "
                "several of its elements are one place in memory; clone() it first"
            )


def _are_simple(tensors: list[Any]) -> bool:
    """Whether all are DTensors on one mesh, with no mask to apply and no reduced value to recall."""
    if not is_laid_out(tensors[0]):
        return False
    comm = tensors[0]._tensor_layout.comm
    return all(
        is_laid_out(t)
        and t._tensor_layout.comm is comm
        and not t._tensor_layout.has_lookup
        and t._tensor_layout.reduced is None
        for t in tensors
    )


def _how(func: OpOverload, rule: Rule | None) -> str:
    if program_of(func) is not None:
        return "rule, by its program"
    if rule is not None and rule.axis_rules is not None:
        return "rule"
    if facts_of(func).functional is not None or decomposition_of(func) is not None:
        return "no rule: made of other ops"
    return "no rule: its inputs were replicated"
