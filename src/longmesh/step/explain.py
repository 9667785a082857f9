"""A step in words, and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longmesh.step.step_plan import StepPlan

SCHEMA = 1


def in_words(step: StepPlan) -> str:
    """How a step is run, in a few words: what a table shows."""
    options = step.options
    parts = [str(step.mesh)]
    if options.trains:
        parts.append(
            {"none": "no recompute", "selective": "selective recompute", "full": "full recompute"}[
                options.recompute
            ]
        )
    if options.offload:
        parts.append("offloaded")
    if options.loss == "tiled":
        parts.append("tiled loss")
    if options.rows > 1:
        parts.append(f"{options.rows} rows")
    return ", ".join(parts)


def explain_step(step: StepPlan) -> str:
    """Several lines: the mesh, the time and where it goes, the memory and what makes its peak, what travels."""
    time, memory, options = step.time, step.memory, step.options
    micro = options.micro_batches(step.mesh)
    size = f"{step.trace.num_parameters / 1e9:.2f} B parameters"
    rate = f"{step.tokens_per_second_per_gpu:.0f} tokens/s per rank, {time.compute_share:.0%} computing"
    parts = f"forward {time.forward / 1e6:.3f} s, backward {time.backward / 1e6:.3f} s"
    again = f"(of it recompute {time.recompute / 1e6:.3f}), optimizer {time.optimizer / 1e6:.3f} s"
    lines = [
        f"{step.trace.name}, {size}, {step.seq_len} tokens on {step.mesh.num_ranks} ranks: {in_words(step)}",
        f"  time    {step.step_seconds:.3f} s per step ({step.band[0]:.3f} to {step.band[1]:.3f}), {rate}",
        f"          {parts} {again}; {micro} x {options.rows} sequences per rank",
    ]
    waits = ", ".join(f"{name} {us / 1e6:.3f} s" for name, us in time.waits if us)
    lines.append(f"  waits   {waits or 'none'}")
    if options.stages > 1:
        lines.append(
            f"          pipeline of {options.stages} stages by formula only: its bubble, and memory divided"
        )
    fits = "fits" if step.fits else "does not fit"
    there = step.machine.memory_bytes / 1e9
    lines.append(f"  memory  {memory.peak / 1e9:.1f} of {there:.1f} GB ({fits}); peak in {memory.phase}")
    lines += [f"          {kind:<20} {size / 1e9:8.2f} GB" for kind, size in memory.by_kind]
    sent = ", ".join(f"{axis} {size / 1e9:.2f} GB" for axis, size in step.sent_bytes.items() if size)
    lines.append(f"  sends   {sent or 'nothing'}")
    for kind, cost in zip(step.trace.kinds, step.costs, strict=True):
        for plan in cost.plans:
            lines.append(
                f"  {kind.name} x {kind.repeats}: {plan.mask} by {plan.exchange}, layout {plan.layout}"
            )
    return "\n".join(lines)


def step_to_json(step: StepPlan) -> dict[str, Any]:
    """Keys are added to, never renamed."""
    options = step.options
    return {
        "schema": SCHEMA,
        "step_seconds": step.step_seconds,
        "step_seconds_band": list(step.band),
        "memory_bytes": round(step.memory.peak),
        "memory_by_kind": _rounded(step.memory.by_kind, round(step.memory.peak)),
        "tokens_per_second_per_gpu": step.tokens_per_second_per_gpu,
        "mesh": step.mesh._asdict(),
        "fits": step.fits,
        "assumed": [dict(item._asdict()) for item in step.machine.assumed],
        "memory_phase": step.memory.phase,
        "sent_bytes_by_axis": {axis: round(size) for axis, size in step.sent_bytes.items()},
        "compute_share": step.time.compute_share,
        "options": {
            "batch": step.batch,
            "rows": options.rows,
            "micro_batches": options.micro_batches(step.mesh),
            "recompute": options.recompute,
            "offload": options.offload,
            "matmul_dtype": options.matmul_dtype,
            "optimizer": options.optimizer,
            "loss": options.loss,
            "exchange": options.exchange,
            "compiled": options.compiled,
            "fsdp": options.fsdp,
        },
    }


def _rounded(by_kind: tuple[tuple[str, float], ...], total: int) -> dict[str, int]:
    """Whole bytes that add up to the total."""
    found = {kind: int(size) for kind, size in by_kind}
    largest = max(found, key=lambda kind: found[kind])
    found[largest] += total - sum(found.values())
    return found
