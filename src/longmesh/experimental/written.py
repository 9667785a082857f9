"""Registered ops that write to their arguments: what is written reaches the DTensor, wherever the op ran.

An argument in the layout that a line of the rule wants is written in place. One that had to be redistributed first is
written in that layout, and the result is redistributed back.
"""

from __future__ import annotations

from typing import Any

import torch

from longmesh._torch import OpOverload, schema_of
from longmesh.rules.rule import Meta, OpCall
from longmesh.rules.table import registered
from longmesh.spec import Layout
from longmesh.tensor.autograd import apply_lookup_mask, move
from longmesh.tensor.dtensor import DTensor
from longmesh.tensor.op_facts import rule_name
from longmesh.tensor.op_plan import Output, wrap
from longmesh.tensor.plain import replicate_plain
from longmesh.tensor.propagate import choose
from longmesh.tensor.tree import all_tensors, map_tensors
from longmesh.tensor.view_origin import write_to_origin


def run_written(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A handler: run a mutating op by its registered rule. Collective where arguments have to be moved."""
    args, kwargs = replicate_plain(func, args, kwargs)
    written = [t for t in all_tensors(written_arguments(func, args, kwargs)) if isinstance(t, DTensor)]
    for tensor in written:
        if tensor._lookup is not None:
            apply_lookup_mask(tensor)
    layouts, outputs = _plan(func, args, kwargs)
    moved: list[tuple[DTensor, DTensor]] = []
    wanted = iter(layouts)

    def to_local(tensor: torch.Tensor) -> torch.Tensor:
        assert isinstance(tensor, DTensor)
        there = move(tensor, next(wanted))
        if there._local_tensor is not tensor._local_tensor and any(tensor is w for w in written):
            moved.append((tensor, there))
        return there._local_tensor

    local_args, local_kwargs = map_tensors(to_local, (args, kwargs))
    result = func(*local_args, **local_kwargs)
    for tensor, there in moved:
        tensor._local_tensor.copy_(move(there, tensor._layout)._local_tensor)
    for tensor in written:
        if tensor._origin is not None:
            write_to_origin(tensor, move)
    return _results(func, result, args, kwargs, outputs)


def _plan(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Layout, ...], list[Output]]:
    """Where the arguments must lie, and how the outputs will. The same on every rank."""
    tensors = [t for t in all_tensors((args, kwargs)) if isinstance(t, DTensor)]
    metas: list[Meta] = []

    def describe(tensor: torch.Tensor) -> Meta:
        metas.append(Meta(len(metas), tuple(tensor.shape), tensor.stride(), tensor.dtype))
        return metas[-1]

    meta_args, meta_kwargs = map_tensors(describe, (args, kwargs))
    call = OpCall(func, meta_args, meta_kwargs, tuple(metas))
    rule = registered.get(rule_name(func))
    assert rule is not None and rule.out_meta is not None
    call = OpCall(func, meta_args, meta_kwargs, call.tensors, rule.out_meta(call))
    choice = choose(call, rule.axis_rules(call), tuple(t._layout for t in tensors))
    assert choice is not None, "everything replicated is always valid"
    mesh = tensors[0]._mesh
    outputs = [Output(mesh, y, m.shape, m.stride) for y, m in zip(choice.outputs, call.outputs, strict=True)]
    return choice.inputs, outputs


def written_arguments(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The values of the arguments that the op's schema says it writes to."""
    found: list[Any] = []
    for position, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[position] if position < len(args) else kwargs.get(argument.name))
    return found


def _results(
    func: OpOverload, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Output]
) -> Any:
    """What the op returns: the DTensors that it wrote to themselves, its new tensors wrapped."""
    returns = schema_of(func).returns
    if not returns:
        return None
    values = result if len(returns) > 1 else (result,)
    given = iter(outputs)
    wrapped: list[Any] = []
    for value, spec in zip(values, returns, strict=True):
        found = [next(given) for _ in all_tensors(value)]
        if spec.alias_info is not None:
            wrapped.append(_argument_of(func, spec.alias_info, args, kwargs))
        else:
            own = iter(found)
            wrapped.append(map_tensors(lambda t, own=own: wrap(t, next(own)), value))
    return wrapped[0] if len(wrapped) == 1 else tuple(wrapped)


def _argument_of(func: OpOverload, alias: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    for position, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.before_set == alias.before_set:
            return args[position] if position < len(args) else kwargs.get(argument.name)
    raise AssertionError(f"{schema_of(func)} returns an alias of none of its arguments")
