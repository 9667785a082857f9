"""strict: no redistribution that was not asked for."""

from __future__ import annotations

from longmesh.debug.op_watch import Move, OpWatch, WatchedOp
from longmesh.errors import LongmeshError
from longmesh.plan.render import format_bytes


class strict(OpWatch):
    """Inside `with strict():` an op that would redistribute an input raises, before anything is sent.

    Layouts and plans are the same on every rank, so all raise alike. Let through: a redistribution that sends
    nothing (a replicated tensor is sliced), and a reduction that is part of an op (a softmax over a cut dim needs its
    maximum). Backward passes inside the `with` are held to it too.

    >>> a = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    >>> with strict():
    ...     a + distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)])
    Traceback (most recent call last):
        ...
    longmesh.errors.LongmeshError: strict(): aten.add.Tensor of ... would redistribute input 1 from S(1) to S(0)...
    """

    def on_move(self, op: WatchedOp, move: Move) -> None:
        plan = move.plan
        if not move.is_implicit or not plan.num_collectives:
            return
        inputs = ", ".join(map(str, op.inputs))
        remedy = (
            f"call redistribute(placements={list(plan.dst.placements)}) on it first, or give it that layout"
        )
        what = f"input {move.input}"
        if move.input is None:
            what, remedy = f"an intermediate value of {plan.shape}", "bring its inputs to other layouts first"
        raise LongmeshError(
            f"strict(): {op.func} of {inputs} would redistribute {what} from {plan.src} to {plan.dst} "
            f"and send {format_bytes(plan.total_bytes)}, at {op.where}; {remedy}"
        )
