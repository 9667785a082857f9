"""Charts and the picture of a plan: well-formed, and covering what they show."""

import base64
import re
import sys
from xml.dom import minidom

import numpy as np
import pytest

from longmesh.attention import masks, plan_attention
from longmesh.attention.mask.slices import area, make_slices
from longmesh.debug.charts import BarPart, Curve, draw_bars, draw_curves
from longmesh.debug.plan_picture import draw_plan, outline
from longmesh.errors import LongmeshError


def plan_of_two(exchange="auto"):
    lengths = [400, 90, 510]
    return plan_attention(seq_len=1000, ranks=2, mask=masks.documents(lengths), exchange=exchange, chunk=64)


def pictures(page):
    found = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    for picture in found:
        minidom.parseString(picture)
    return found


def polygon_area(corners):
    q, k = np.array(corners).T
    return abs(np.dot(q, np.roll(k, 1)) - np.dot(k, np.roll(q, 1))) / 2


@pytest.mark.parametrize(
    "slice_",
    [(0, 40, 10, 50), (0, 100, 0, 100, -1000, 0), (0, 100, 0, 100, -20, 0), (30, 70, 0, 100, -50, 5)],
)
def test_an_outline_has_the_area_of_its_slice(slice_):
    part = make_slices(slice_)
    # A diagonal cuts squares in halves: half a pair for each end of each diagonal, at the most.
    assert polygon_area(outline(part[0])) == pytest.approx(area(part)[0], abs=1.0)


def test_the_plans_picture_covers_what_is_computed():
    (picture,) = pictures(draw_plan(plan_of_two(), size=1000.0))
    covered = 0.0
    for points in re.findall(r'<polygon points="([^"]*)"', picture):
        corners = [tuple(map(float, point.split(","))) for point in points.split()]
        covered += polygon_area(corners)
    assert covered == pytest.approx(sum(n * (n + 1) / 2 for n in (400, 90, 510)), rel=1e-3)
    assert "rank 0: queries" in picture and "rank 1: queries" in picture
    (split,) = pictures(draw_plan(plan_of_two("ulysses")))
    assert "ranks 0 to 1: queries" in split


def chart(element):
    """The SVG that an <img> holds."""
    (data,) = re.fullmatch(r'<img alt="[^"]*" src="data:image/svg\+xml;base64,([^"]*)">', element).groups()
    text = base64.b64decode(data).decode()
    minidom.parseString(text)
    return text


def labels(svg):
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def test_odd_charts_are_still_pictures():
    pytest.importorskip("matplotlib", reason="comes with the extra plot")
    assert chart(draw_curves([Curve("one point", "#000000", 1, [2.0])]))
    assert "nothing to see" in chart(
        draw_curves([Curve("nothing to see", "#000000", 1, [0.0, 0.0])], is_log=True)
    )
    gap = chart(draw_curves([Curve("a gap", "#123456", 1, [1.0, float("nan"), 3.0])]))
    (line,) = re.findall(r'<path d="([^"]*)" clip-path="[^"]*" style="fill: none; stroke: #123456', gap)
    assert line.count("L") == 1
    assert "rank &lt;0&gt;" in labels(chart(draw_bars([("rank <0>", [BarPart("idle", "#000000", 0.0)])])))


def test_marks_of_an_axis_differ():
    pytest.importorskip("matplotlib", reason="comes with the extra plot")
    svg = chart(draw_curves([Curve("difference", "#000000", 1, [2.96e-7, 3.04e-7, 3.02e-7])]))
    marks = [float(text) for text in labels(svg) if re.fullmatch(r"[0-9.]+", text)]
    assert len(set(marks)) >= 4


def test_charts_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(LongmeshError, match=r"a chart needs matplotlib: pip install 'longmesh\[plot\]'"):
        draw_bars([])
