"""strict: nothing is sent that was not asked for."""

from __future__ import annotations

from longmesh.debug.op_watch import OpWatch, WatchedOp
from longmesh.errors import LongmeshError
from longmesh.plan.words import format_bytes
from longmesh.tensor.sending_steps import Redistribute
from longmesh.tensor.steps import Step


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
        for step in op.plan.steps if op.plan is not None else ():
            if step.is_collective and not (isinstance(step, Redistribute) and step.is_reduction):
                _refuse(op, step)


def _refuse(op: WatchedOp, step: Step) -> None:
    inputs = ", ".join(map(str, op.inputs))
    if not isinstance(step, Redistribute):
        raise LongmeshError(
            f"strict(): {op.func} of {inputs} would send {format_bytes(step.sent_bytes)} from this rank "
            f"({step}), at {op.where}; redistribute its inputs first, so that the dims that it works along are whole"
        )
    plan = step.plan
    what = f"input {step.input}"
    remedy = f"call redistribute(placements={list(plan.dst.placements)}) on it first, or give it that layout"
    if step.input is None:
        what, remedy = f"an intermediate value of {plan.shape}", "redistribute its inputs first"
    raise LongmeshError(
        f"strict(): {op.func} of {inputs} would redistribute {what} from {plan.src} to {plan.dst} "
        f"and send {format_bytes(plan.total_bytes)}, at {op.where}; {remedy}"
    )
