"""strict: nothing is sent that was not asked for."""

from __future__ import annotations

from longmesh.debug.op_watch import OpWatch, WatchedOp
from longmesh.errors import LongmeshError
from longmesh.plan.words import format_bytes
from longmesh.rules.steps import Redistribute, Step
from longmesh.tensor.op_plan import OpPlan
from longmesh.tensor.step_cost import is_collective, route_of


class strict(OpWatch):
    """Inside `with strict():` an op whose plan would send anything raises, before anything is sent: by redistributing
    an input, exchanging rows (a slice, flip or roll along a sharded dim) or gathering ranks' results (cumsum, topk).

    Layouts and plans are the same on every rank, so all of them raise. Allowed are a redistribution that sends
    nothing (a replicated tensor is sliced), and a reduction that is part of an op (a softmax over a sharded dim needs
    its maximum). Backward passes inside the `with` are checked too.

    >>> a = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    >>> with strict():
    ...     a + distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)])
    Traceback (most recent call last):
        ...
    longmesh.errors.LongmeshError: strict(): aten.add.Tensor of ... would redistribute input 1 from S(1) to S(0)...
    """

    def before_op(self, op: WatchedOp) -> None:
        plan = op.plan
        for step in plan.steps if plan is not None else ():
            is_asked = isinstance(step, Redistribute) and step.is_reduction
            if plan is not None and not is_asked and is_collective(step, plan.places):
                _refuse(op, plan, step)


def _refuse(op: WatchedOp, op_plan: OpPlan, step: Step) -> None:
    inputs = ", ".join(map(str, op.inputs))
    if not isinstance(step, Redistribute):
        raise LongmeshError(
            f"strict(): {op.func} of {inputs} would send {format_bytes(op_plan.bytes_of(step))} from this rank "
            f"({step}), at {op.where}; redistribute its inputs first, so that the dims that it works along are whole"
        )
    plan = route_of(step, op_plan.places)
    what = f"input {step.input}"
    remedy = f"call redistribute(placements={list(plan.dst.placements)}) on it first, or give it that layout"
    if step.input is None:
        what, remedy = f"an intermediate value of {plan.shape}", "redistribute its inputs first"
    raise LongmeshError(
        f"strict(): {op.func} of {inputs} would redistribute {what} from {plan.src} to {plan.dst} "
        f"and send {format_bytes(plan.total_bytes)}, at {op.where}; {remedy}"
    )
