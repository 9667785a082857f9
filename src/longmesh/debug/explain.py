"""explain: run a function and tell, for every op on DTensors, what it did and what it cost.

print(explain(model, x))

  3  aten.mm.default                         model.py:31
       inputs  (8, 6) S(0), (6, 4) S(1)
       rule    axis 'tp': S(0), R -> S(0)
    !! implicit redistribution of input 1, (6, 4): S(1) -> R
         1. all_gather     S(1) -> R, over axis 'tp' (2), each rank sends 48 B
            all 2 ranks of the group need the whole of dim 1
       output  (8, 4) S(0)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from rich.text import Text

from longmesh.comm import CommEvent
from longmesh.debug.op_watch import Operand, OpWatch, WatchedOp
from longmesh.plan import RedistributePlan, plan_redistribute
from longmesh.plan.render import format_bytes
from longmesh.rules import find_rule
from longmesh.spec import Layout
from longmesh.tensor.dispatch import dispatch
from longmesh.tensor.op_plan import decomposition_of, functional_form, rule_name


@dataclass(frozen=True, slots=True)
class Redistribution:
    """A tensor that went to another layout: because the program asked for it, because an op needed its `input` (None:
    an intermediate value) so, or to carry out a reduction `inside` an op."""

    kind: Literal["asked", "implicit", "inside"]
    plan: RedistributePlan
    where: str
    input: int | None = None

    @property
    def total_bytes(self) -> int:
        """What all ranks sent together."""
        return self.plan.total_bytes


@dataclass(frozen=True, slots=True)
class ExplainedOp:
    """One op on DTensors. `where`: its call site, of a backward op with the node's name. `rule`: per mesh axis, the
    placements it ran with; `how`: where that came from."""

    name: str
    where: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    rule: tuple[str, ...]
    how: str
    redistributions: tuple[Redistribution, ...]
    collectives: tuple[CommEvent, ...]


Step = ExplainedOp | Redistribution | CommEvent


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `explain` saw, in order: ops, redistributions outside of them, and collectives that belong to neither.

    Prints as text, with colours through rich. `result`: of the function.
    """

    steps: tuple[Step, ...]
    result: Any

    @property
    def ops(self) -> tuple[ExplainedOp, ...]:
        return tuple(step for step in self.steps if isinstance(step, ExplainedOp))

    @property
    def redistributions(self) -> tuple[Redistribution, ...]:
        """All of them, in the order they ran."""
        found: list[Redistribution] = []
        for step in self.steps:
            if isinstance(step, ExplainedOp):
                found += step.redistributions
            elif isinstance(step, Redistribution):
                found.append(step)
        return tuple(found)

    @property
    def implicit(self) -> tuple[Redistribution, ...]:
        return self._of_kind("implicit")

    def _of_kind(self, kind: str) -> tuple[Redistribution, ...]:
        return tuple(r for r in self.redistributions if r.kind == kind)

    def __str__(self) -> str:
        return "\n".join(line for line, _ in _lines(self))

    def __rich__(self) -> Text:
        styled = [Text(line, style=style) for line, style in _lines(self)]
        return Text("\n").join(styled)


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Run `fn(*args, **kwargs)` and tell what every op on DTensors did. Collective where `fn` is."""
    watch = _Recorder()
    with watch:
        result = fn(*args, **kwargs)
    return Explanation(tuple(watch.steps), result)


class _Recorder(OpWatch):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []

    def on_op(self, op: WatchedOp) -> None:
        self.steps.append(_explain_op(op))

    def on_explicit(self, plan: RedistributePlan, where: str) -> None:
        self.steps.append(Redistribution("asked", plan, where))

    def on_collective(self, event: CommEvent) -> None:
        self.steps.append(event)


def _explain_op(op: WatchedOp) -> ExplainedOp:
    ran_with = [operand.layout for operand in op.inputs]
    for move in op.moves:
        if move.input is not None:
            ran_with[move.input] = move.plan.dst
    return ExplainedOp(
        name=str(op.func),
        where=op.where,
        inputs=op.inputs,
        outputs=op.outputs,
        rule=_rule_lines(ran_with, [y.layout for y in op.outputs]),
        how=_how(op),
        redistributions=tuple(
            Redistribution("implicit" if move.is_implicit else "inside", move.plan, op.where, move.input)
            for move in op.moves
        ),
        collectives=tuple(op.events),
    )


def _rule_lines(inputs: list[Layout], outputs: list[Layout]) -> tuple[str, ...]:
    meshes = {layout.mesh for layout in (*inputs, *outputs)}
    if len(meshes) != 1:
        return ()
    mesh = meshes.pop()
    return tuple(
        f"{mesh.axis_name(axis)}: {', '.join(str(y.placements[axis]) for y in inputs)} -> "
        + (", ".join(str(y.placements[axis]) for y in outputs) or "a plain value")
        for axis in range(mesh.ndim)
    )


def _how(op: WatchedOp) -> str:
    functional = functional_form(op.func)
    if op.func in dispatch.handlers:
        return "code of its own"
    if find_rule(rule_name(functional or op.func)) is not None:
        return f"rule, the cheapest: {_cost(op)}" if op.moves else "rule"
    if functional is not None or decomposition_of(op.func) is not None:
        return "no rule: made of other ops"
    return "no rule: its inputs were replicated"


def _cost(op: WatchedOp) -> str:
    """What the moves were predicted to take, beside the plain way out."""
    took = sum(move.plan.cost_us for move in op.moves)
    whole = 0.0
    for operand in op.inputs:
        target = Layout.replicated(operand.layout.mesh)
        itemsize = op.moves[0].plan.itemsize
        whole += plan_redistribute(operand.layout, target, shape=operand.shape, itemsize=itemsize).cost_us
    return f"its moves are predicted at {took:.0f} us, replicating every input at {whole:.0f} us"


def _lines(explanation: Explanation) -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    for number, step in enumerate(explanation.steps, 1):
        if isinstance(step, ExplainedOp):
            lines += _op_lines(number, step)
        elif isinstance(step, CommEvent):
            what = (
                f"{step.kind} over {' x '.join(step.axes)}, this rank sends {format_bytes(step.sent_bytes)}"
            )
            lines.append((f"{number:4}  {what}, asked for at {step.call_site}", "cyan"))
        else:
            lines.append((f"{number:4}  redistribution, asked for at {step.where}", "cyan"))
            lines += [(f"      {line}", "cyan") for line in step.plan.explain().splitlines()]
    implicit, asked = explanation.implicit, explanation._of_kind("asked")
    summary = (
        f"{_count(len(explanation.ops), 'op')}; {_count(len(implicit), 'implicit redistribution')}, "
        f"{_bytes(implicit)} on the wire; {len(asked)} asked for, {_bytes(asked)}"
    )
    lines.append((summary, "bold"))
    return lines


def _op_lines(number: int, op: ExplainedOp) -> list[tuple[str, str]]:
    lines = [
        (f"{number:4}  {op.name:<34} {op.where}", "bold"),
        (f"        inputs  {', '.join(map(str, op.inputs)) or 'none'}", ""),
        (f"        rule    {'; '.join(op.rule) or 'several meshes'}  ({op.how})", ""),
    ]
    for move in op.redistributions:
        lines += _move_lines(move)
    planned = sum(move.plan.num_collectives for move in op.redistributions)
    if len(op.collectives) > planned:
        kinds = ", ".join(f"{e.kind} {format_bytes(e.sent_bytes)}" for e in op.collectives)
        lines.append((f"        sends   {kinds} (this rank, all of the op)", "red"))
    lines.append((f"        output  {', '.join(map(str, op.outputs)) or 'a plain value'}", ""))
    return lines


def _move_lines(move: Redistribution) -> list[tuple[str, str]]:
    steps = move.plan.explain().splitlines()
    if move.kind == "inside":
        return [
            ("        inside  a reduction that is part of the op", ""),
            *((f"          {s}", "") for s in steps),
        ]
    style = "bold red" if move.plan.num_collectives else "yellow"
    local = "" if move.plan.num_collectives else " (local, nothing is sent)"
    what = "an intermediate value" if move.input is None else f"input {move.input}"
    head = f"     !! implicit redistribution of {what}{local}"
    return [(head, style), *((f"          {s}", style) for s in steps)]


def _bytes(moves: Any) -> str:
    return format_bytes(sum(move.total_bytes for move in moves))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
