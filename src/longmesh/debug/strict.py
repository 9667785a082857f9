"""strict: no redistribution that was not asked for."""

from __future__ import annotations

from longmesh.debug.op_watch import Move, OpWatch, WatchedOp
from longmesh.errors import LongmeshError
from longmesh.plan.render import format_bytes


class strict(OpWatch):
    """Inside `with strict():` an op that would redistribute an input raises, before anything is sent.

    Layouts and plans are the same on every rank, so all raise alike. Let through: a redistribution that sends
    nothing (a replicated tensor is sliced), and what an op sends of its own values (a softmax over a cut dim its
    maximum). Backward passes inside the `with` are held to it too.
    """

    def on_move(self, op: WatchedOp, move: Move) -> None:
        plan = move.plan
        if move.input is None or not plan.num_collectives:
            return
        inputs = ", ".join(map(str, op.inputs))
        raise LongmeshError(
            f"strict(): {op.func} of {inputs} would redistribute input {move.input} from {plan.src} to {plan.dst} "
            f"and send {format_bytes(plan.total_bytes)}, at {op.where}; "
            f"call redistribute(placements={list(plan.dst.placements)}) on it first, or give it that layout"
        )
