"""Registered ops that write to their arguments: what is written reaches the DTensor, wherever the op ran.

An argument in the layout that a line of the rule wants is written in place. One that had to be redistributed first is
written in that layout, and the result is redistributed back.
"""

from __future__ import annotations

from typing import Any

from longmesh._torch import OpOverload, schema_of
from longmesh.rules.op_facts import rule_name, written_arguments
from longmesh.rules.planned import Part, Planned
from longmesh.rules.rule import OutMeta, arguments_of
from longmesh.rules.table import registered
from longmesh.rules.tree import all_tensors, map_tensors
from longmesh.spec import Layout
from longmesh.tensor.lines import describe_call
from longmesh.tensor.planner import Planner
from longmesh.tensor.propagate import choose


def run_written(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A family: a mutating op by its registered rule."""
    tensors: list[Any] = all_tensors((args, kwargs))
    layouts, metas = _choose(p, func, args, kwargs)
    moved = [p.redistribute(t, layout) for t, layout in zip(tensors, layouts, strict=True)]
    there = iter(moved)
    local_args, local_kwargs = map_tensors(lambda _: next(there), (args, kwargs))
    result = p.local(func, *local_args, **local_kwargs)
    written = all_tensors(written_arguments(func, args, kwargs))
    for tensor, value in zip(tensors, moved, strict=True):
        if value is not tensor and any(tensor is w for w in written):
            p.write(tensor, value)
    return _results(p, func, result, args, kwargs, metas, tensors[0])


def _choose(
    p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Layout, ...], list[tuple[Layout, OutMeta]]]:
    """The layouts of the arguments, and those of the outputs with their metas. The same on every rank."""
    rule = registered.get(rule_name(func))
    assert rule is not None and rule.out_meta is not None and rule.axis_rules is not None
    call, layouts = describe_call(func, rule, args, kwargs)
    choice = choose(call, rule.axis_rules(call), layouts, p.comm.cluster)
    assert choice is not None, "everything replicated is always valid"
    return choice.inputs, list(zip(choice.outputs, call.outputs, strict=True))


def _results(
    p: Planner,
    func: OpOverload,
    result: Part,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    metas: list[tuple[Layout, OutMeta]],
    like: Planned,
) -> Any:
    """What the op returns: the tensors that it wrote to themselves, its new tensors wrapped."""
    returns = schema_of(func).returns
    if not returns:
        return None
    found: list[Any] = []
    place = 0
    for spec in returns:
        is_list = "[]" in str(spec.type)
        count = len(metas) - place - (len(returns) - len(found) - 1) if is_list else 1
        if spec.alias_info is not None:
            found.append(_argument_of(func, spec.alias_info, args, kwargs))
        else:
            made = [_take(p, result, n, metas[n], like) for n in range(place, place + count)]
            found.append(made if is_list else made[0])
        place += count
    return found[0] if len(found) == 1 else tuple(found)


def _take(p: Planner, result: Part, number: int, made: tuple[Layout, OutMeta], like: Planned) -> Planned:
    layout, meta = made
    part = p.local(lambda found: all_tensors(found)[number], result)
    return p.wrap(part, like, layout=layout, shape=meta.shape)


def _argument_of(func: OpOverload, alias: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    arguments = schema_of(func).arguments
    names = [a.name for a in arguments if a.alias_info and a.alias_info.before_set == alias.before_set]
    assert names, f"{schema_of(func)} returns an alias of none of its arguments"
    return arguments_of(func, args, kwargs)[names[0]]
