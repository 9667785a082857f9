"""explain: run a function and report, for every op on DTensors, what it did and what it cost.

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
from typing import Any

from longmesh.comm import CommEvent
from longmesh.debug.explanation import ExplainedOp, Explanation, Redistribution, Sending, Step
from longmesh.debug.op_watch import OpWatch, WatchedOp
from longmesh.plan import RedistributePlan, plan_redistribute
from longmesh.rules.steps import Redistribute
from longmesh.spec import Layout
from longmesh.tensor.step_cost import is_collective, route_of


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Run `fn(*args, **kwargs)` and report what every op on DTensors did. Collective if `fn` is.

    >>> a = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)])
    >>> b = distribute_tensor(torch.ones(6, 4), mesh, [Shard(1)])
    >>> print(explain(torch.mm, a, b))
       1  aten.mm.default                    ...
            inputs  (4, 6) S(0), (6, 4) S(1)
            rule    axis 0: S(0), R -> S(0)  (rule, the cheapest: ...
         !! implicit redistribution of input 1
              S(1) -> R on MeshShape((2,)), shape (6, 4), 4 bytes per element
                1. all_gather     S(1) -> R, over axis 0 (2), each rank sends 48 B
                   all 2 ranks of the group need the whole of dim 1
                1 collective; each rank sends 48 B on average, the busiest receives 48 B; predicted 50 us
            output  (4, 4) S(0)
    1 op; 1 implicit redistribution, 96 B on the wire; 0 asked for, 0 B
    """
    watch = _OpRecorder()
    with watch:
        result = fn(*args, **kwargs)
    return Explanation(tuple(watch.steps), result)


class _OpRecorder(OpWatch):
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
    plan = op.plan
    steps, places = ((), ()) if plan is None else (plan.steps, plan.places)
    sent = [0 if plan is None else plan.bytes_of(step) for step in steps]
    moves = [step for step in steps if isinstance(step, Redistribute)]
    ran_with = [operand.layout for operand in op.inputs]
    for move in moves:
        if move.input is not None and move.input < len(ran_with):
            ran_with[move.input] = move.want
    return ExplainedOp(
        name=str(op.func),
        where=op.where,
        inputs=op.inputs,
        outputs=op.outputs,
        rule=_rule_lines(ran_with, [y.layout for y in op.outputs]),
        how=_how(op, moves),
        redistributions=tuple(
            Redistribution(
                "inside" if move.is_reduction else "implicit", route_of(move, places), op.where, move.input
            )
            for move in moves
        ),
        sends=tuple(
            Sending(str(step), count)
            for step, count in zip(steps, sent, strict=True)
            if is_collective(step, places) and not isinstance(step, Redistribute)
        ),
        sent_bytes=sum(sent),
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


def _how(op: WatchedOp, moves: list[Redistribute]) -> str:
    if op.plan is None:
        return "scalars for a plain tensor"
    if op.plan.how == "rule" and moves:
        return f"rule, the cheapest: {_cost(op, moves)}"
    return op.plan.how


def _cost(op: WatchedOp, moves: list[Redistribute]) -> str:
    """What the redistributions are predicted to take, beside the plain way out."""
    assert op.plan is not None
    took = sum(route_of(move, op.plan.places).cost_us for move in moves)
    whole = 0.0
    for x in op.inputs:
        target = Layout.replicated(x.layout.mesh)
        how = {"itemsize": x.itemsize, "cluster": x.cluster}
        whole += plan_redistribute(x.layout, target, shape=x.shape, **how).cost_us
    return f"its moves are predicted at {took:.0f} us, replicating every input at {whole:.0f} us"
