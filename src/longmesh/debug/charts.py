"""Curves and bars, drawn by matplotlib as SVG images that a page holds itself: no script and no file beside it.

Matplotlib comes with the extra `plot`. Only what no library draws is drawn by hand here: shard maps, attention plans.
"""

from __future__ import annotations

import base64
import importlib
import importlib.util
import io
import math
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

from longmesh.errors import LongmeshError

GREY = "#c4c4c4"
_WIDTH, _HEIGHT, _BAR = 7.2, 2.8, 0.3  # inches


class Curve(NamedTuple):
    """A line of a chart; a value that is not finite is left out."""

    name: str
    color: str
    thickness: float
    values: Sequence[float]


class BarPart(NamedTuple):
    """A stretch of a bar."""

    name: str
    color: str
    value: float


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw_curves(curves: Sequence[Curve], *, is_log: bool = False) -> str:
    """Lines over steps 1, 2, ..., with a legend, as an `<img>` element."""
    figure, axes = _make_figure(_HEIGHT)
    for curve in curves:
        known = [(i + 1, v) for i, v in enumerate(curve.values) if math.isfinite(v) and (v > 0 or not is_log)]
        steps, values = zip(*known, strict=True) if known else ((), ())
        style = {"color": curve.color, "linewidth": curve.thickness, "marker": "." if len(known) == 1 else ""}
        axes.plot(steps, values, label=curve.name, **style)
    if is_log and any(line.get_xdata().size for line in axes.get_lines()):
        axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(color="#e4e4e4")
    axes.legend(frameon=False)
    return _to_image(figure, ", ".join(curve.name for curve in curves))


def draw_bars(bars: Sequence[tuple[str, Sequence[BarPart]]]) -> str:
    """One bar under another, all to one scale, each of several parts, as an `<img>` element."""
    figure, axes = _make_figure(1.1 + _BAR * len(bars))
    named: set[str] = set()
    for place, (_, parts) in enumerate(bars):
        left = 0.0
        for part in parts:
            label = "_" if part.name in named else part.name
            axes.barh(place, part.value, left=left, color=part.color, label=label, height=0.8)
            named.add(part.name)
            left += part.value
    axes.set_yticks(range(len(bars)), [name for name, _ in bars])
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=max(len(named), 1), frameon=False)
    return _to_image(figure, ", ".join(name for name, _ in bars))


def _make_figure(height: float) -> tuple[Any, Any]:
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise LongmeshError("a chart needs matplotlib: pip install 'longmesh[plot]'") from error
    figure = figures.Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.add_subplot()


def _to_image(figure: Any, about: str) -> str:
    """The figure as an element of a page; the same figures give the same bytes."""
    matplotlib = importlib.import_module("matplotlib")
    file = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "longmesh"}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    data = base64.b64encode(file.getvalue()).decode()
    return f'<img alt="{escape(about)}" src="data:image/svg+xml;base64,{data}">'
