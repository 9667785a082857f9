"""A redistribution plan in words: step, axes, bytes, why."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from longmesh.plan.words import count, format_bytes
from longmesh.spec import Layout, Partial, Shard

if TYPE_CHECKING:
    from longmesh.plan.search import RedistributePlan
    from longmesh.plan.step import Step


def explain_plan(plan: RedistributePlan) -> str:
    """The whole plan, one step a line with its reason below."""
    head = (
        f"{plan.src} -> {plan.dst} on {plan.src.mesh}, shape {plan.shape}, {plan.itemsize} bytes per element"
    )
    if not plan.steps:
        return f"{head}\n  nothing to do"
    lines = [head]
    for number, step in enumerate(plan.steps, 1):
        lines += [f"  {number}. {explain_step(step)}", f"     {_why(step)}"]
    lines.append(
        f"  {count(plan.num_collectives, 'collective')}; "
        f"each rank sends {_mean(plan.total_bytes, plan.src)} on average, "
        f"the busiest receives {format_bytes(plan.rank_bytes)}; predicted {plan.cost_us:.0f} us"
    )
    return "\n".join(lines)


def explain_step(step: Step) -> str:
    """One line: what, from which layout to which, over which axes, how much."""
    move = f"{step.kind:<14} {step.src} -> {step.dst}"
    if step.is_local:
        return f"{move}, local"
    return f"{move}, over {_axes(step)}, each rank sends {_mean(step.total_bytes, step.src)}"


def _why(step: Step) -> str:
    ranks = math.prod(step.src.mesh.sizes[a] for a in step.axes)
    match step.kind:
        case "slice":
            return "each rank already holds what it needs"
        case "pad":
            return "each rank's piece becomes its term of the pending reduction, padded with the identity"
        case "all_gather":
            return f"all {ranks} ranks of the group need the whole of {_dims(step)}" + _fused(step)
        case "all_to_all":
            return "each rank receives exactly what it lacks; nothing is gathered and dropped" + _fused(step)
        case "reduce_scatter":
            return (
                f"the pending {_op(step)} is reduced only to the piece that each rank needs: half an all_reduce"
                + _fused(step)
            )
        case "all_reduce":
            return f"all {ranks} ranks of the group need the whole pending {_op(step)}" + _fused(step)


def _fused(step: Step) -> str:
    return f"; one collective for {len(step.axes)} axes" if len(step.axes) > 1 else ""


def _axes(step: Step) -> str:
    mesh = step.src.mesh
    return " x ".join(f"{mesh.axis_name(a)} ({mesh.sizes[a]})" for a in step.axes)


def _op(step: Step) -> str:
    ops = [p.reduce_op for a in step.axes if isinstance(p := step.src.placements[a], Partial)]
    return "/".join(dict.fromkeys(ops))


def _dims(step: Step) -> str:
    dims = [p.dim for a in step.axes if isinstance(p := step.src.placements[a], Shard)]
    return "dim " + " and ".join(str(d) for d in dict.fromkeys(dims))


def _mean(total_bytes: int, layout: Layout) -> str:
    return format_bytes(total_bytes / layout.mesh.num_ranks)


__all__ = ["explain_plan", "explain_step"]
