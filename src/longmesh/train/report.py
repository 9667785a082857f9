"""What a run leaves for people and for later runs: figures (run.json), a page (report.html) and a few lines.

The page stands alone: no script, no file beside it, nothing from the network. Its charts need the extra `plot`; without
it, it has their figures as tables.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, dataclass, field, replace
from html import escape
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from longmesh.comm import collectives, comm_of
from longmesh.debug.charts import GREY, BarPart, Curve, can_draw, draw_bars, draw_curves
from longmesh.debug.plan_picture import draw_plan
from longmesh.debug.shard_picture import piece_color
from longmesh.errors import LongmeshError
from longmesh.plan.words import count
from longmesh.train.loop import RunRecord
from longmesh.train.options import TrainOptions
from longmesh.train.parallel import Axes, DrawnPlan
from longmesh.train.progress import name_run

TOLERANCE = 1e-4
PART = "part.json"  # the figures of the first part of a run that was started in two
STYLE = (
    "body{font:15px system-ui,sans-serif;max-width:760px;margin:2em auto;color:#222}"
    "pre{font-size:12px;white-space:pre-wrap}"
)
PLAN_LEGEND = (
    "queries downwards, keys to the right, coloured by the rank that computes them; the stripe at the left shows who "
    "owns the tokens; of the sequences of this run, the one with the most documents that are long enough to be seen"
)


@dataclass(frozen=True)
class Summary:
    """A run in figures. `busy_seconds` and `wait_seconds` are by rank, over the steps that `step_seconds` has."""

    curve: dict[str, Any]
    mesh: tuple[int, int, int]
    losses: list[float]
    step_seconds: list[float]
    busy_seconds: list[float]
    wait_seconds: list[float]
    stragglers: list[str] = field(default_factory=list)

    @property
    def num_ranks(self) -> int:
        return len(self.busy_seconds)

    @property
    def name(self) -> str:
        return name_run(self.num_ranks)

    @property
    def step_tokens(self) -> int:
        return self.curve["batch"] * self.curve["seq_len"]

    @property
    def tokens_per_second(self) -> float:
        """Of the median step: a few steps that were disturbed don't count."""
        return self.step_tokens / median(self.step_seconds)

    @property
    def wait_shares(self) -> list[float]:
        """The part of each rank's time in which it waits for others."""
        pairs = zip(self.wait_seconds, self.busy_seconds, strict=True)
        return [waited / max(waited + busy, 1e-9) for waited, busy in pairs]


def summarize(record: RunRecord, options: TrainOptions, axes: Axes) -> Summary:
    """The figures of all ranks, on each of them. Collective: every rank of the mesh."""
    # The first step plans, makes groups and warms caches; it counts only where it is the only one.
    timed = record.steps[1:] or record.steps
    waited = sum(step.wait_seconds for step in timed)
    busy = sum(step.seconds for step in timed) - waited
    mine = torch.tensor([busy, waited], dtype=torch.float64, device=axes.world.device_type)
    every = collectives.all_gather(mine, group=comm_of(axes.world).group((0, 1, 2)))
    every_busy, every_waited = every.view(-1, 2).T.tolist()
    seconds = [step.seconds for step in timed]
    return Summary(
        options.curve, options.mesh_shape, record.losses, seconds, every_busy, every_waited, record.stragglers
    )


def write_part(summary: Summary, options: TrainOptions) -> None:
    """Write the figures of a run that a later start continues."""
    Path(options.out, PART).write_text(json.dumps(asdict(summary)))


def add_part(summary: Summary, options: TrainOptions) -> Summary:
    """The figures with those of the part before, if this run continues one."""
    file = Path(options.out, PART)
    if not file.exists():
        return summary
    before = Summary(**json.loads(file.read_text()))
    file.unlink()
    losses = before.losses
    if tuple(before.mesh) != tuple(summary.mesh) or summary.losses[: len(losses)] != losses:
        return summary  # left by another run
    busy, waited = (
        [a + b for a, b in zip(*pair, strict=True)]
        for pair in (
            (before.busy_seconds, summary.busy_seconds),
            (before.wait_seconds, summary.wait_seconds),
        )
    )
    seconds = before.step_seconds + summary.step_seconds
    return replace(summary, step_seconds=seconds, busy_seconds=busy, wait_seconds=waited)


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
    summary: Summary, baseline: Summary | None, drawn: DrawnPlan | None, options: TrainOptions
) -> str:
    """Write run.json and report.html; what to say at the end, in lines. Those of an earlier run are kept beside."""
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    kept = keep_earlier(out)
    (out / "run.json").write_text(json.dumps(asdict(summary)))
    said = describe(summary, baseline)
    page = out / "report.html"
    page.write_text(make_page(summary, baseline, drawn, said), encoding="utf-8")
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
    lines = [f"{summary.name}: {_figures(summary)}"]
    if baseline is not None:
        difference = largest_difference(summary, baseline)
        verdict = "within" if difference < TOLERANCE else "NOT within"
        one = f"{baseline.num_ranks}-rank" if baseline.num_ranks > 1 else "one-process"
        span = f"{count(len(summary.losses), 'step')}, {verdict} {TOLERANCE:.0e}"
        lines.append(compare_speeds(summary, baseline, one))
        lines.append(f"largest difference from the {one} loss: {difference:.1e} over {span}")
    return lines


def compare_speeds(summary: Summary, baseline: Summary, one: str) -> str:
    """How much faster than `baseline`, with the spread. More than the ranks can give is called noise, and no figure."""
    times, most = (
        median(baseline.step_seconds) / median(summary.step_seconds),
        summary.num_ranks / baseline.num_ranks,
    )
    if most > 1 and times > most:
        return (
            f"the speed can't be compared: by these figures {summary.num_ranks} ranks are more than {most:g} times as "
            f"fast as the {one} run, so the machine did other work meanwhile; run it again when it is idle"
        )
    said = f"{times:.2f} times the {baseline.tokens_per_second:,.0f} tokens/s of the {one} run, by the median step"
    if min(len(summary.step_seconds), len(baseline.step_seconds)) < 4:
        return f"{said}; too few steps to show how much they vary"
    (fast, _, slow), (base_fast, _, base_slow) = (
        quantiles(run.step_seconds, n=4) for run in (summary, baseline)
    )
    return f"{said}; {base_fast / slow:.2f} to {base_slow / fast:.2f} times over the middle half of the steps"


def _figures(summary: Summary) -> str:
    steps = f"{count(len(summary.losses), 'step')} of {count(summary.step_tokens, 'token')}"
    losses = f"loss {summary.losses[0]:.4f} to {summary.losses[-1]:.4f}"
    figures = f"{steps}, {losses}, {summary.tokens_per_second:,.0f} tokens/s"
    if summary.num_ranks == 1:
        return figures
    shares = summary.wait_shares
    least, most = (f"rank {shares.index(share)} {share:.0%}" for share in (min(shares), max(shares)))
    return f"{figures}, waiting for others: {least} to {most} of its time"


def make_page(summary: Summary, baseline: Summary | None, drawn: DrawnPlan | None, said: list[str]) -> str:
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
    sections.append(("Time of each rank", f"in seconds, over the steps after the first{slow}", _bars(bars)))
    if drawn is not None:
        plan, stats = drawn.plan, drawn.plan.stats()
        areas = [
            (f"rank {s.rank}", [BarPart("pairs of a query and a key", piece_color(s.rank), s.area)])
            for s in stats
        ]
        words = f"<pre>{escape(plan.explain())}</pre>"
        sections += [
            (
                "Attention of each rank",
                "pairs that it computes, of the sequence that is drawn below",
                _bars(areas),
            ),
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
