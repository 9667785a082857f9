"""Ops whose plan can't be known before values are seen: they run as other ops, one by one, each with its own plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from longmesh._torch import OpOverload
from longmesh.comm import Place
from longmesh.rules.op_facts import decomposition_of, facts_of, refuse_new_shape, written_targets
from longmesh.rules.steps import RunOps, Slot
from longmesh.tensor.autograd import apply_lookup_mask, move
from longmesh.tensor.bound_plan import replace_target
from longmesh.tensor.op_plan import OpPlan
from longmesh.tensor.plain import decomposing, on_whole_tensors
from longmesh.tensor.view_origin import run_on_views


def plan_one_by_one(func: OpOverload, place: Place) -> OpPlan:
    """The plan of such an op."""
    return _plan_of(func, run_one_by_one, place, "no rule: made of other ops")


def plan_through_views(func: OpOverload, place: Place) -> OpPlan:
    """The plan of an op on views that had to be copied: whether they are read again is known when it runs."""
    return _plan_of(func, run_on_views, place, "through the tensors that its inputs are views of")


def _plan_of(func: OpOverload, run: Callable[..., Any], place: Place, how: str) -> OpPlan:
    return OpPlan((RunOps(func, run, 0),), (place,), result=Slot(0), num_slots=1, how=how)


def run_one_by_one(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An op by the ops that it is made of."""
    functional = facts_of(func).functional
    if functional is not None:
        return write_back(func, functional, args, kwargs)
    decomposition = decomposition_of(func)
    if decomposition is None:
        return on_whole_tensors(func, args, kwargs)
    token = decomposing.set(True)
    try:
        return decomposition(*args, **kwargs)
    finally:
        decomposing.reset(token)


def write_back(
    func: OpOverload, functional: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """An in-place or out= op whose target can't stay in its layout: compute, redistribute, copy."""
    targets, kwargs = written_targets(func, args, kwargs)
    result = functional(*args, **kwargs)
    if torch.Tag.inplace_view in func.tags:
        return replace_target(func, args, kwargs, result)
    results = result if isinstance(result, (tuple, list)) else [result]
    for target, value in zip(targets, results, strict=False):
        refuse_new_shape(func, target, value)
        if target._lookup is not None:
            apply_lookup_mask(target)
        target._local_tensor.copy_(move(value, target._layout)._local_tensor)
    return targets[0] if len(targets) == 1 else tuple(targets)
