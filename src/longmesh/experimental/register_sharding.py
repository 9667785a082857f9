"""register_sharding: how an op of yours, or one of torch's, runs on DTensors.

    @register_sharding(torch.ops.mylib.scale.default, check_with=[(torch.randn(5, 3), 2.0)])
    def scale_sharding(x, factor):
        return [([Shard(d)], [Shard(d), None]) for d in range(x.ndim)] + [([Partial()], [Partial(), None])]

The function is called with the op's arguments, every tensor replaced by its global shape, stride and dtype, and
lists what is valid on one mesh axis: placements of the outputs and of the inputs, None for what is not a tensor.
"Everything replicated" is always valid. The dispatcher combines the axes and takes what is cheapest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from longmesh._torch import OpOverload, schema_of
from longmesh.errors import LongmeshError
from longmesh.experimental.rule_check import check_rule
from longmesh.experimental.written import run_written
from longmesh.rules.op_facts import rule_name, run_on_meta
from longmesh.rules.rule import AxisRule, Meta, OpCall, OutMeta, Rule
from longmesh.rules.table import registered
from longmesh.spec import Placement, Shard
from longmesh.tensor.arguments import normalize_placements
from longmesh.tensor.dispatch import dispatch

Line = tuple[Sequence[Placement | None], Sequence[Placement | None]]
ShardingFunction = Callable[..., Sequence[Line]]


def register_sharding(
    op: OpOverload | list[OpOverload], *, check_with: Sequence[Any] | None = None
) -> Callable[[ShardingFunction], ShardingFunction]:
    """A decorator that registers a function's lines as the rule of `op`, or of several, in place of the built-in one.

    Input placements go by the op's arguments in the order of its schema, keyword arguments included. An op that
    writes to arguments writes to the DTensors; one without outputs lists []. With `check_with`, samples of the op's
    arguments (a tuple, or a pair of a tuple and a dict of keywords), every line is tried out in this process on 2 and
    3 simulated ranks, and one that does not hold is an error before anything is registered.

    >>> @torch.library.custom_op("examples::double", mutates_args=())
    ... def double(x: torch.Tensor) -> torch.Tensor:
    ...     return 2 * x
    >>> _ = double.register_fake(torch.empty_like)
    >>> @register_sharding(torch.ops.examples.double.default, check_with=[torch.randn(5, 3)])
    ... def keeps_shards(x):
    ...     return [([Shard(dim)], [Shard(dim)]) for dim in range(x.ndim)]
    >>> double(distribute_tensor(torch.ones(5), mesh, [Shard(0)])).placements
    (Shard(dim=0),)
    """
    overloads = op if isinstance(op, list) else [op]
    for overload in overloads:
        if not isinstance(overload, OpOverload):
            raise LongmeshError(
                f"register_sharding takes an op overload, got {overload!r}; write e.g. torch.ops.aten.add.Tensor"
            )

    def register(function: ShardingFunction) -> ShardingFunction:
        rules = {overload: _rule_of(overload, function) for overload in overloads}
        for overload, rule in rules.items():
            for sample in check_with or ():
                check_rule(overload, rule, *_as_call(sample))
        for overload, rule in rules.items():
            _install(overload, rule)
        return function

    return register


def _install(op: OpOverload, rule: Rule) -> None:
    is_mutable = schema_of(op).is_mutable
    registered[rule_name(op)] = replace(rule, program=run_written) if is_mutable else rule
    dispatch.forget_plans()


def _as_call(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if not isinstance(sample, (tuple, list)):
        return (sample,), {}
    if len(sample) == 2 and isinstance(sample[0], (tuple, list)) and isinstance(sample[1], dict):
        return tuple(sample[0]), sample[1]
    return tuple(sample), {}


def _rule_of(op: OpOverload, function: ShardingFunction) -> Rule:
    def lines(call: OpCall) -> list[AxisRule]:
        given = function(*call.args, **call.kwargs)
        return [_read_line(op, call, number, entry) for number, entry in enumerate(given)]

    def out_meta(call: OpCall) -> tuple[OutMeta, ...]:
        try:
            return run_on_meta(call)
        except NotImplementedError as error:
            raise LongmeshError(
                f"the output shapes of {op} are not known: it has no kernel for meta tensors; add one with "
                f"torch.library.register_fake({schema_of(op).name!r})"
            ) from error

    return Rule(lines, out_meta)


def _read_line(op: OpOverload, call: OpCall, number: int, entry: Line) -> AxisRule:
    outputs, inputs = ([p for p in side if p is not None] for side in entry)
    order = _tensors_by_schema(op, call)
    if len(inputs) != len(order) or len(outputs) != len(call.outputs):
        raise LongmeshError(
            f"register_sharding({op}): line {number} has {len(outputs)} output and {len(inputs)} input placements, the "
            f"call has {len(call.outputs)} and {len(order)} tensors; list one per tensor in "
            f"the order of {schema_of(op)}"
        )
    placed: list[Placement] = list(inputs)
    for placement, meta in zip(inputs, order, strict=True):
        placed[meta.index] = _checked(op, number, placement, meta.shape)
    results = [
        _checked(op, number, placement, meta.shape)
        for placement, meta in zip(outputs, call.outputs, strict=True)
    ]
    return AxisRule(tuple(placed), tuple(results))


def _tensors_by_schema(op: OpOverload, call: OpCall) -> list[Meta]:
    """The call's tensors in the order of the schema's arguments, however they were passed."""
    found: list[Meta] = []
    for position, argument in enumerate(schema_of(op).arguments):
        value = call.args[position] if position < len(call.args) else call.kwargs.get(argument.name)
        found += [m for m in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(m, Meta)]
    return found


def _checked(op: OpOverload, number: int, placement: Placement, shape: Sequence[int]) -> Placement:
    where = f"register_sharding({op}), line {number}"
    (placement,) = normalize_placements((placement,), len(shape), where)
    if isinstance(placement, Shard) and placement.dim >= len(shape):
        raise LongmeshError(
            f"{where}: {placement!r} is out of range for a tensor of shape {tuple(shape)}; list only dims that it has"
        )
    return placement
