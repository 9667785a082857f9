"""What explain() found out, as values, and as text in which implicit redistributions stand out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rich.text import Text

from longmesh.comm import CommEvent
from longmesh.debug.op_watch import Operand
from longmesh.plan import RedistributePlan
from longmesh.plan.words import count, format_bytes


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
class Sending:
    """A step of an op that sends something and is not a redistribution; `sent_bytes` leave this rank."""

    what: str
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class ExplainedOp:
    """One op on DTensors. `where`: its call site, of a backward op with the node's name. `rule`: per mesh axis, the
    placements it ran with; `how`: where that came from. `sends`: what else of its plan sends; `sent_bytes`: by this
    rank, in all."""

    name: str
    where: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    rule: tuple[str, ...]
    how: str
    redistributions: tuple[Redistribution, ...]
    sends: tuple[Sending, ...]
    sent_bytes: int
    collectives: tuple[CommEvent, ...]


Step = ExplainedOp | Redistribution | CommEvent


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `explain` saw, in order: ops, redistributions outside of them, and collectives that belong to neither.

    Prints as text, with colours through rich. `result`: of the function.

    >>> x = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
    >>> explained = explain(torch.sum, x)
    >>> explained.result.placements, len(explained.steps)
    ((Partial(sum),), 1)
    >>> print(explained)
       1  aten.sum.default                   ...
            inputs  (5,) S(0)
            rule    axis 0: S(0) -> P  (rule)
            output  () P
    1 op; 0 implicit redistributions, 0 B on the wire; 0 asked for, 0 B
    """

    steps: tuple[Step, ...]
    result: Any

    @property
    def ops(self) -> tuple[ExplainedOp, ...]:
        """The ops on DTensors."""
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
        """The redistributions that ops needed and nobody asked for."""
        return self._of_kind("implicit")

    def _of_kind(self, kind: str) -> tuple[Redistribution, ...]:
        return tuple(r for r in self.redistributions if r.kind == kind)

    def __str__(self) -> str:
        return "\n".join(line for line, _ in _lines(self))

    def __rich__(self) -> Text:
        styled = [Text(line, style=style) for line, style in _lines(self)]
        return Text("\n").join(styled)


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
    lines.append((_summary(explanation), "bold"))
    return lines


def _summary(explanation: Explanation) -> str:
    """Everything that the lines above say was sent: redistributions by all ranks, the rest by this rank."""
    implicit, asked, inside = (explanation._of_kind(kind) for kind in ("implicit", "asked", "inside"))
    parts = [
        count(len(explanation.ops), "op"),
        f"{count(len(implicit), 'implicit redistribution')}, {_bytes(implicit)} on the wire",
        f"{len(asked)} asked for, {_bytes(asked)}",
    ]
    if inside:
        parts.append(f"{count(len(inside), 'reduction')} inside ops, {_bytes(inside)} on the wire")
    sends = [sending.sent_bytes for op in explanation.ops for sending in op.sends]
    others = [step.sent_bytes for step in explanation.steps if isinstance(step, CommEvent)]
    for sizes, what, where in ((sends, "exchange", "inside"), (others, "collective", "outside")):
        if sizes:
            total = format_bytes(sum(sizes))
            parts.append(f"{count(len(sizes), what)} {where} ops, {total} from this rank")
    return "; ".join(parts)


def _op_lines(number: int, op: ExplainedOp) -> list[tuple[str, str]]:
    lines = [
        (f"{number:4}  {op.name:<34} {op.where}", "bold"),
        (f"        inputs  {', '.join(map(str, op.inputs)) or 'none'}", ""),
        (f"        rule    {'; '.join(op.rule) or 'several meshes'}  ({op.how})", ""),
    ]
    for move in op.redistributions:
        lines += _move_lines(move)
    for sending in op.sends:
        what = f"{sending.what}: this rank sends {format_bytes(sending.sent_bytes)}"
        lines.append((f"     !! {what}", "bold red"))
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
