"""Curves and bars as SVG, for pages that stand alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

import numpy as np

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 720, 280, 64, 36, 12
GREY = "#c4c4c4"


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


def draw_curves(curves: Sequence[Curve], *, is_log: bool = False) -> str:
    """Lines over steps 1, 2, ..., with a legend."""
    scaled = [[_scale(value, is_log) for value in curve.values] for curve in curves]
    known = [value for values in scaled for value in values if value is not None] or [0.0]
    low, high = min(known), max(known)
    low, high = (low - 0.5, high + 0.5) if low == high else (low, high)
    steps = max(len(values) for values in scaled)
    shapes: list[str] = []
    for mark in np.linspace(low, high, 5).tolist():
        y = _at(mark, low, high, HEIGHT - BOTTOM, TOP)
        label = f"{10**mark:.0e}" if is_log else f"{mark:.2f}"
        shapes.append(
            f'<path d="M{LEFT} {y:.1f}H{WIDTH - 8}" stroke="#e4e4e4"/>{_text(LEFT - 8, y, label, "end")}'
        )
    for step in sorted({1, (steps + 1) // 2, steps}):
        shapes.append(_text(_at(step, 1, max(steps, 2), LEFT, WIDTH - 8), HEIGHT - BOTTOM + 16, str(step)))
    for curve, values in zip(curves, scaled, strict=True):
        points = " ".join(
            f"{_at(i + 1, 1, max(steps, 2), LEFT, WIDTH - 8):.1f},{_at(value, low, high, HEIGHT - BOTTOM, TOP):.1f}"
            for i, value in enumerate(values)
            if value is not None
        )
        style = f'fill="none" stroke="{curve.color}" stroke-width="{curve.thickness}"'
        shapes.append(f'<polyline points="{points}" {style}/>')
    shapes.append(_legend([(curve.name, curve.color) for curve in curves]))
    return svg(WIDTH, HEIGHT, shapes)


def draw_bars(bars: Sequence[tuple[str, Sequence[BarPart]]]) -> str:
    """One bar under another, all to one scale, each of several parts."""
    most = max((sum(part.value for part in parts) for _, parts in bars), default=0.0) or 1.0
    shapes: list[str] = []
    for number, (name, parts) in enumerate(bars):
        x, y = float(LEFT), TOP + 26.0 * number
        shapes.append(_text(LEFT - 8, y + 10, name, "end"))
        for part in parts:
            width = part.value / most * (WIDTH - LEFT - 8)
            box = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="20"'
            tip = escape(f"{part.name}: {part.value:,.4g}")
            shapes.append(f'<rect {box} fill="{part.color}"><title>{tip}</title></rect>')
            x += width
    shapes.append(_legend([(part.name, part.color) for part in bars[0][1]] if bars else []))
    return svg(WIDTH, TOP + 26 * len(bars) + BOTTOM, shapes)


def _scale(value: float, is_log: bool) -> float | None:
    if is_log:
        return math.log10(value) if value > 0 and math.isfinite(value) else None
    return value if math.isfinite(value) else None


def _at(value: float, low: float, high: float, start: float, stop: float) -> float:
    return start + (value - low) / (high - low) * (stop - start)


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" dominant-baseline="central"'
    return f'<text {place} font-size="12">{escape(text)}</text>'


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    parts = [f'<tspan fill="{color}">&#9632;</tspan> {escape(name)}&#160;&#160;' for name, color in entries]
    return f'<text x="{LEFT}" y="100%" dy="-6" font-size="12">{"".join(parts)}</text>'


def svg(width: float, height: float, shapes: Sequence[str]) -> str:
    return (
        f'<svg width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}">'
        + "".join(shapes)
        + "</svg>"
    )
