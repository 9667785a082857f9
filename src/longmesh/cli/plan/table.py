"""The answer of `longmesh plan` as text: a table of the best, why the others are slower, what would have to change."""

from __future__ import annotations

from longmesh.step.explain import in_words
from longmesh.step.search import Found
from longmesh.step.step_plan import StepPlan

_BAR = 12


def describe(found: Found, config: str) -> str:
    """Several lines."""
    best = found.best
    lines = [f"{'':2}{'mesh and policy':<52}{'s/step':>9}{'tokens/s/GPU':>14}{'computing':>11}  memory"]
    for place, plan in enumerate(found.shown(5)):
        mark = "* " if place == 0 and plan.fits else "  "
        lines.append(
            f"{mark}{in_words(plan):<52}{plan.step_seconds:>9.3f}{plan.tokens_per_second_per_gpu:>14.0f}"
            f"{plan.time.compute_share:>11.0%}  {memory_bar(plan)}"
        )
        if place:
            lines.append(f"    {next_reason(best, plan)}")
    lines += ["", best.explain(), ""]
    if not best.fits:
        lines.append(f"Nothing fits: {best.memory.peak / 1e9:.1f} GB at least; {what_would_help(best)}")
    else:
        lines += ["To run it:", *(f"  {line}" for line in python_lines(best, config))]
    assumed = "; ".join(f"{a.name} {a.value} ({a.source})" for a in best.machine.assumed)
    lines += ["", f"Assumed: {assumed}" if assumed else "All rates are measured."]
    options = best.options
    sequences = "1 sequence" if best.batch == 1 else f"{best.batch} sequences"
    lines.append(
        f"Defaults: {sequences} per step, one per dp rank at a time; {options.optimizer}; "
        f"{'FSDP over dp x cp' if options.fsdp else 'no FSDP'}; parameters {options.parameter_bytes} bytes"
    )
    return "\n".join(lines)


def memory_bar(plan: StepPlan) -> str:
    share = plan.memory.peak / plan.machine.memory_bytes
    full = min(_BAR, round(share * _BAR))
    mark = "" if plan.fits else " too much"
    return f"[{'#' * full}{'.' * (_BAR - full)}] {plan.memory.peak / 1e9:.1f} GB{mark}"


def next_reason(best: StepPlan, plan: StepPlan) -> str:
    """Why a candidate is behind the best, in one line."""
    if plan is best:
        return "the fastest that fits" if plan.fits else "the smallest; nothing fits"
    if not plan.fits:
        kind, size = plan.memory.largest[0]
        over = (plan.memory.peak - plan.machine.memory_bytes) / 1e9
        return f"does not fit: {over:.1f} GB too much, {kind} takes {size / 1e9:.1f} GB"
    per_token = best.tokens_per_second_per_gpu / plan.tokens_per_second_per_gpu - 1
    tokens = [p.batch * p.seq_len / p.mesh.num_ranks for p in (best, plan)]
    waits = dict(plan.time.waits)
    mine = dict(best.time.waits)
    more = {name: waits[name] / tokens[1] - mine.get(name, 0.0) / tokens[0] for name in waits}
    more["recompute"] = plan.time.recompute / tokens[1] - best.time.recompute / tokens[0]
    more["smaller products or more attention"] = (plan.time.compute - plan.time.recompute) / tokens[1] - (
        best.time.compute - best.time.recompute
    ) / tokens[0]
    name = max(more, key=lambda key: more[key])
    cause = name if name in ("recompute", "smaller products or more attention") else f"waiting for {name}"
    return f"{per_token:.1%} slower: {cause}"


def what_would_help(best: StepPlan) -> str:
    kind, size = best.memory.largest[0]
    ways = "more GPUs, a shorter sequence, --offload, or --optimizer adamw-offload"
    return f"{kind} takes {size / 1e9:.1f} GB of it: use {ways}"


def python_lines(best: StepPlan, config: str) -> list[str]:
    """What runs the plan."""
    mesh = best.mesh
    names = [name for name, size in mesh._asdict().items() if size > 1 or name == "cp"]
    sizes = tuple(getattr(mesh, name) for name in names)
    lines = [
        f"mesh = init_device_mesh('cuda', {sizes}, mesh_dim_names={tuple(names)})",
        f"model = AutoModelForCausalLM.from_pretrained({config!r}, attn_implementation='longmesh')",
    ]
    if mesh.tp > 1 or mesh.ep > 1:
        lines.append("model = longmesh.hf.parallelize(model, mesh)")
    if best.options.recompute == "full":
        lines.append("model.gradient_checkpointing_enable({'use_reentrant': False})")
    cut = "mesh['cp']" if len(names) > 1 else "mesh"
    loss = "longmesh.hf.tiled_loss(model, part)" if best.options.loss == "tiled" else "model(**part).loss"
    lines.append(f"with longmesh.hf.context_parallel({cut}, batch, model=model) as part: {loss}.backward()")
    return lines
