"""What a run leaves for people and for later runs: figures (run.json), a page (report.html) and a few lines.

The page stands alone: no script, no file beside it, nothing from the network. Its charts need the extra `plot`; without
it, it has their figures as tables.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import torch

from longmesh.attention import AttentionPlan
from longmesh.comm import collectives, comm_of
from longmesh.debug.charts import GREY, BarPart, Curve, can_draw, draw_bars, draw_curves
from longmesh.debug.picture import piece_color
from longmesh.debug.plan_picture import draw_plan
from longmesh.errors import LongmeshError
from longmesh.plan.words import count
from longmesh.train.loop import RunRecord
from longmesh.train.options import TrainOptions
from longmesh.train.parallel import Axes

TOLERANCE = 1e-4
STYLE = (
    "body{font:15px system-ui,sans-serif;max-width:760px;margin:2em auto;color:#222}"
    "pre{font-size:12px;overflow:auto}"
)
PLAN_LEGEND = (
    "queries downwards, keys to the right, coloured by the rank that computes them; the stripe at the left shows who "
    "owns the tokens"
)


@dataclass(frozen=True)
class Summary:
    """A run in figures. `busy_seconds` and `wait_seconds` are by rank."""

    curve: dict[str, Any]
    mesh: tuple[int, int, int]
    losses: list[float]
    tokens_per_second: float
    busy_seconds: list[float]
    wait_seconds: list[float]
    stragglers: list[str] = field(default_factory=list)

    @property
    def num_ranks(self) -> int:
        return len(self.busy_seconds)

    @property
    def name(self) -> str:
        return f"{self.num_ranks} ranks" if self.num_ranks > 1 else "one process"

    @property
    def wait_share(self) -> float:
        waited = sum(self.wait_seconds)
        return waited / max(waited + sum(self.busy_seconds), 1e-9)


def summarize(record: RunRecord, options: TrainOptions, axes: Axes) -> Summary:
    """The figures of all ranks, on each of them. Collective: every rank of the mesh."""
    waited = sum(step.wait_seconds for step in record.steps)
    busy = sum(step.seconds for step in record.steps) - waited
    mine = torch.tensor([busy, waited], dtype=torch.float64, device=axes.world.device_type)
    every = collectives.all_gather(mine, group=comm_of(axes.world).group((0, 1, 2)))
    every_busy, every_waited = every.view(-1, 2).T.tolist()
    # The first step plans, makes groups and warms caches; it counts only where it is the only one.
    timed = record.steps[1:] or record.steps
    rate = options.batch * options.seq_len * len(timed) / sum(step.seconds for step in timed)
    return Summary(
        options.curve, options.mesh_shape, record.losses, rate, every_busy, every_waited, record.stragglers
    )


def read_summary(options: TrainOptions) -> Summary:
    """The figures of the run to compare with, if it can be compared."""
    path = Path(options.baseline or "", "run.json")
    try:
        summary = Summary(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise LongmeshError(f"{options.typed('baseline')} has no figures of a run in it: {error}") from error
    differing = options.describe_differences(summary.curve)
    if differing:
        raise LongmeshError(
            f"{options.typed('baseline')} ran with {differing}; compare runs that differ in the mesh only"
        )
    if len(summary.losses) < options.steps:
        raise LongmeshError(
            f"{options.typed('baseline')} has {count(len(summary.losses), 'step')}, this run will have "
            f"{options.steps}; run it again with as many"
        )
    return summary


def largest_difference(summary: Summary, baseline: Summary) -> float:
    """The largest difference of the losses, step by step; infinite where one is not a number."""
    pairs = zip(summary.losses, baseline.losses, strict=False)
    differences = [abs(a - b) for a, b in pairs]
    return max(x if x == x else float("inf") for x in differences)


def write_report(
    summary: Summary, baseline: Summary | None, plan: AttentionPlan | None, options: TrainOptions
) -> str:
    """Write run.json and report.html; what to say at the end, in lines. Those of an earlier run are kept beside."""
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    kept = keep_earlier(out)
    (out / "run.json").write_text(json.dumps(asdict(summary)))
    said = describe(summary, baseline)
    page = out / "report.html"
    page.write_text(make_page(summary, baseline, plan, said), encoding="utf-8")
    earlier = [] if kept is None else [f"the earlier run's page: {kept.absolute()}"]
    return "\n".join([*earlier, f"page: {page.absolute()}", *said])


def keep_earlier(out: Path) -> Path | None:
    """Rename the files of an earlier run (report.html -> report-1.html); its page, if there is one."""
    if not any((out / name).exists() for name in ("run.json", "report.html")):
        return None
    number = next(n for n in itertools.count(1) if not list(out.glob(f"*-{n}.[hj]*")))
    for name in ("run.json", "report.html"):
        file = out / name
        if file.exists():
            file.rename(file.with_stem(f"{file.stem}-{number}"))
    return out / f"report-{number}.html"


def describe(summary: Summary, baseline: Summary | None) -> list[str]:
    """The run in words; the comparison last."""
    tokens = summary.curve["batch"] * summary.curve["seq_len"]
    lines = [f"{summary.name}: {_figures(summary, tokens)}"]
    if baseline is not None:
        difference = largest_difference(summary, baseline)
        verdict = "within" if difference < TOLERANCE else "NOT within"
        ratio = summary.tokens_per_second / baseline.tokens_per_second
        one = f"{baseline.num_ranks}-rank" if baseline.num_ranks > 1 else "one-process"
        span = f"{len(summary.losses)} steps, {verdict} {TOLERANCE:.0e}"
        lines.append(f"{ratio:.2f} times the {baseline.tokens_per_second:,.0f} tokens/s of the {one} run")
        lines.append(f"largest difference from the {one} loss: {difference:.1e} over {span}")
    return lines


def _figures(summary: Summary, step_tokens: int) -> str:
    return (
        f"{len(summary.losses)} steps of {step_tokens:,} tokens, loss {summary.losses[0]:.4f} to "
        f"{summary.losses[-1]:.4f}, {summary.tokens_per_second:,.0f} tokens/s, {summary.wait_share:.0%} of the time in "
        "communication"
    )


def make_page(summary: Summary, baseline: Summary | None, plan: AttentionPlan | None, said: list[str]) -> str:
    """The page as HTML."""
    curves = [Curve(summary.name, piece_color(0), 2, summary.losses)]
    sections = [("Loss", "by step", _curves(curves))]
    if baseline is not None:
        pairs = list(zip(summary.losses, baseline.losses, strict=False))
        curves.insert(0, Curve(baseline.name, GREY, 7, [b for _, b in pairs]))
        gap = Curve("difference", piece_color(1), 2, [abs(a - b) for a, b in pairs])
        equal = "steps that are equal to the last bit are left out"
        sections = [
            ("Loss", "by step: both runs, one drawn over the other", _curves(curves)),
            ("Difference", f"of the two losses, by step; {equal}", _curves([gap], is_log=True)),
        ]
    times = zip(summary.busy_seconds, summary.wait_seconds, strict=True)
    bars = [
        (
            f"rank {rank}",
            [BarPart("computing", piece_color(rank), busy), BarPart("waiting for others", GREY, waited)],
        )
        for rank, (busy, waited) in enumerate(times)
    ]
    slow = "".join(f"; {escape(line)}" for line in summary.stragglers)
    sections.append(("Time of each rank", f"in seconds, over all steps{slow}", _bars(bars)))
    if plan is not None:
        stats = plan.stats()
        areas = [
            (f"rank {s.rank}", [BarPart("pairs of a query and a key", piece_color(s.rank), s.area)])
            for s in stats
        ]
        words = f"<pre>{escape(plan.explain())}</pre>"
        sections += [
            ("Attention of each rank", "pairs that it computes, last sequence", _bars(areas)),
            ("The plan", PLAN_LEGEND, draw_plan(plan) + words),
        ]
    body = "".join(f"<h2>{title}</h2><p>{text}</p>{picture}" for title, text, picture in sections)
    hint = [] if can_draw() else ["Figures as tables: pip install 'longmesh[plot]' brings the charts."]
    told = "".join(f"<p>{escape(line)}</p>" for line in (*said, *hint))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>longmesh train</title><style>{STYLE}</style>'
        f"<h1>longmesh train</h1>{told}{body}</html>\n"
    )


def _curves(curves: list[Curve], *, is_log: bool = False) -> str:
    if can_draw():
        return draw_curves(curves, is_log=is_log)
    length = max(len(curve.values) for curve in curves)
    rows = [
        [str(i + 1), *(f"{curve.values[i]:.6g}" if i < len(curve.values) else "" for curve in curves)]
        for i in range(length)
    ]
    return _table(["step", *(curve.name for curve in curves)], rows)


def _bars(bars: list[tuple[str, list[BarPart]]]) -> str:
    if can_draw():
        return draw_bars(bars)
    names = [part.name for part in bars[0][1]]
    return _table(["", *names], [[name, *(f"{part.value:,.4g}" for part in parts)] for name, parts in bars])


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in (head, *rows)]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"
