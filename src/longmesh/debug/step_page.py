"""A page about a planned step: memory by kind and by phase, where the time of a layer and of the step goes, the
attention plan, and what happens with longer sequences. It stands alone: no script and no file beside it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from longmesh.attention.plan.attention_plan import AttentionPlan
from longmesh.debug.charts import GREY, BarPart, can_draw, draw_bars
from longmesh.debug.plan_picture import draw_plan
from longmesh.debug.shard_picture import piece_color
from longmesh.step.explain import in_words
from longmesh.step.step_plan import StepPlan

_STYLE = (
    "body{font:15px system-ui,sans-serif;max-width:860px;margin:2em auto;color:#222}"
    "pre{font-size:12px;white-space:pre-wrap}td,th{padding:2px 10px;text-align:right}"
)
_MOST_RANKS = 16  # of an attention plan that is drawn


def step_page(step: StepPlan, longer: Sequence[StepPlan] = ()) -> str:
    """The page as HTML. `longer`: plans of longer sequences, for the table of what would happen."""
    title = f"{step.trace.name}, {step.seq_len} tokens on {in_words(step)}"
    parts = [
        f"<!doctype html><meta charset=utf-8><title>{escape(title)}</title><style>{_STYLE}</style>",
        f"<h1>{escape(title)}</h1>",
        "<h2>Memory</h2>",
        _bars([("peak", step.memory.by_kind)], 1e9, "GB"),
        _bars([(name, [(name, size)]) for name, size in step.memory.phases], 1e9, "GB"),
        "<h2>Time of the step</h2>",
        _bars([("step", _step_parts(step))], 1e6, "s"),
        "<h2>Time of one layer</h2>",
        _bars(_layer_bars(step), 1e3, "ms"),
        "<h2>Attention</h2>",
        *(_attention(plan) for plan in step.attention[:2]),
        "<h2>Longer sequences</h2>",
        _table([step, *longer]),
        f"<h2>In words</h2><pre>{escape(step.explain())}</pre>",
        "<h2>Assumed</h2><ul>",
        *(f"<li>{escape(f'{a.name}: {a.value} ({a.source})')}</li>" for a in step.machine.assumed),
        "</ul>",
    ]
    return "\n".join(parts)


def _bars(rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], unit: float, name: str) -> str:
    """Bars of named parts, or a table of them where no chart can be drawn."""
    names = list(dict.fromkeys(part for _, parts in rows for part, _ in parts))
    if not can_draw():
        lines = [
            f"<tr><td>{escape(part)}</td><td>{size / unit:.3f} {name}</td></tr>"
            for _, ps in rows
            for part, size in ps
        ]
        return f"<table>{''.join(lines)}</table>"
    colors = {part: GREY if part.startswith("wait") else piece_color(i) for i, part in enumerate(names)}
    return (
        draw_bars(
            [(row, [BarPart(part, colors[part], size / unit) for part, size in parts]) for row, parts in rows]
        )
        + f"<p>{name}</p>"
    )


def _step_parts(step: StepPlan) -> list[tuple[str, float]]:
    time = step.time
    waits = sum(us for _, us in time.waits)
    busy = time.forward + time.backward - time.recompute - waits
    parts = [("computing", busy), ("recompute", time.recompute), ("optimizer", time.optimizer)]
    return [*parts, *((f"waits for {name}", us) for name, us in time.waits)]


def _layer_bars(step: StepPlan) -> list[tuple[str, list[tuple[str, float]]]]:
    rows: list[tuple[str, list[tuple[str, float]]]] = []
    for kind, took in zip(step.trace.kinds, step.layers, strict=True):
        forward = [("computing", took.forward), ("waits for cp", took.attention_wait_forward)]
        rows.append((f"{kind.name} forward", [*forward, ("waits for tp and ep", took.blocks_forward)]))
        backward = [("computing", took.backward), ("recompute", took.recompute)]
        backward += [
            ("waits for cp", took.attention_wait_backward),
            ("waits for tp and ep", took.blocks_backward),
        ]
        rows.append((f"{kind.name} backward", backward))
        beside = [("gathers parameters", took.gather), ("reduces gradients", took.reduce)]
        rows.append(("beside it", [*beside, ("offloads", took.offload)]))
    return rows


def _attention(plan: AttentionPlan) -> str:
    picture = draw_plan(plan) if plan.num_ranks <= _MOST_RANKS else ""
    return f"{picture}<pre>{escape(plan.explain())}</pre>"


def _table(plans: Sequence[StepPlan]) -> str:
    head = "<tr><th>tokens</th><th>seconds</th><th>tokens/s per GPU</th><th>memory, GB</th><th>fits</th></tr>"
    rows = [
        f"<tr><td>{p.seq_len}</td><td>{p.step_seconds:.3f}</td><td>{p.tokens_per_second_per_gpu:.0f}</td>"
        f"<td>{p.memory.peak / 1e9:.1f}</td><td>{'yes' if p.fits else 'no'}</td></tr>"
        for p in plans
    ]
    return f"<table>{head}{''.join(rows)}</table>"
