"""A shard map as a picture: a grid per panel, its cells as large as their pieces where that can be read.

Pictures are values, rectangles and lines of text, written as SVG, which is text that we write ourselves.
"""

from __future__ import annotations

import colorsys
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

from longmesh.debug.shard_map import Interval, Panel, ShardMap, panels, span
from longmesh.errors import LongmeshError

_GOLDEN = 0.618033988749895
_FONT = "DejaVu Sans, Helvetica, Arial, sans-serif"


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A filled box with a thin border; `tip` shows when the pointer is on it."""

    x: float
    y: float
    width: float
    height: float
    color: str
    tip: str = ""


@dataclass(frozen=True, slots=True)
class Label:
    """One line of text; `x`, `y` is the middle of its left end, its centre or its right end."""

    x: float
    y: float
    text: str
    size: float = 12.0
    anchor: str = "middle"
    color: str = "#000000"
    bold: bool = False


@dataclass(frozen=True, slots=True)
class Picture:
    """What is drawn, from the top left corner, in the order given."""

    width: float
    height: float
    shapes: tuple[Rectangle | Label, ...]
    title: str = ""


def check_picture_path(path: str | os.PathLike[str]) -> None:
    """Raise unless `path` ends as a picture that can be written."""
    suffix = Path(path).suffix.lower()
    if suffix != ".svg":
        raise LongmeshError(f"a picture is written as .svg, not as {suffix!r}: {os.fspath(path)}")


def write_picture(picture: Picture, path: str | os.PathLike[str]) -> None:
    """Write an `.svg` file."""
    check_picture_path(path)
    Path(path).write_text(to_svg(picture), encoding="utf-8")


def to_svg(picture: Picture) -> str:
    """The picture as an SVG document."""
    size = f'width="{picture.width:g}" height="{picture.height:g}"'
    view = f'viewBox="0 0 {picture.width:g} {picture.height:g}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {view} font-family={quoteattr(_FONT)}>',
        f"<title>{escape(picture.title)}</title>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    lines += [_svg_of(shape) for shape in picture.shapes]
    return "\n".join([*lines, "</svg>", ""])


def _svg_of(shape: Rectangle | Label) -> str:
    if isinstance(shape, Rectangle):
        box = f'x="{shape.x:g}" y="{shape.y:g}" width="{shape.width:g}" height="{shape.height:g}"'
        return (
            f'<rect {box} fill="{shape.color}" stroke="#333333" stroke-width="1">'
            f"<title>{escape(shape.tip)}</title></rect>"
        )
    weight = ' font-weight="bold"' if shape.bold else ""
    return (
        f'<text x="{shape.x:g}" y="{shape.y:g}" font-size="{shape.size:g}" fill="{shape.color}"{weight} '
        f'text-anchor="{shape.anchor}" dominant-baseline="central">{escape(shape.text)}</text>'
    )


def piece_color(number: int) -> str:
    """The colour of piece `number`, as `#rrggbb`: hues a golden angle apart, so neighbours differ."""
    light = 0.72 if number % 2 == 0 else 0.6
    rgb = colorsys.hls_to_rgb((0.58 + number * _GOLDEN) % 1.0, light, 0.62)
    return "#" + "".join(f"{round(part * 255):02x}" for part in rgb)


def text_color(background: str) -> str:
    """Black or white, whichever reads better on `background`."""
    red, green, blue = (int(background[i : i + 2], 16) for i in (1, 3, 5))
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"


_MARGIN = 16.0
_LINE = 18.0
_CHARACTER = 7.2
_PANEL_WIDTH, _PANEL_HEIGHT = 300.0, 180.0
_MIN_HEIGHT = 26.0
_AXIS_WIDTH, _AXIS_HEIGHT = 64.0, 20.0


def draw_shards(shards: ShardMap, header: str = "") -> Picture:
    """The picture of a map, panels in rows of about equal number."""
    found = panels(shards)
    lines = [header] if header else []
    lines += [*shards.summary] if found else [*shards.summary, "no elements"]
    shapes: list[Rectangle | Label] = [
        Label(_MARGIN, _MARGIN + (number + 0.5) * _LINE, text, 13, "start", bold=bool(header) and number == 0)
        for number, text in enumerate(lines)
    ]
    top = 2 * _MARGIN + len(lines) * _LINE
    across = max(1, math.ceil(math.sqrt(len(found))))
    widths, heights = _sizes(shards, found)
    step_x = _AXIS_WIDTH + sum(widths) + _MARGIN
    step_y = _LINE + _AXIS_HEIGHT + sum(heights) + _MARGIN
    for number, panel in enumerate(found):
        left = _MARGIN + step_x * (number % across)
        shapes += _panel(shards, panel, left, top + step_y * (number // across), widths, heights)
    text_width = max(len(line) for line in lines) * _CHARACTER * 1.1
    return Picture(
        width=2 * _MARGIN + max(text_width, step_x * across),
        height=top + step_y * math.ceil(len(found) / across) + _MARGIN,
        shapes=tuple(shapes),
        title=header or shards.summary[0],
    )


def _sizes(shards: ShardMap, found: Sequence[Panel]) -> tuple[list[float], list[float]]:
    """Widths of columns and heights of rows: in proportion, but none too small for its text."""
    if not found:
        return [], []
    panel = found[0]
    text = max(len(piece.ranks) for piece in shards.pieces)
    min_width = max(text, *(len(span(i)) for i in panel.cols)) * _CHARACTER + 12
    return _stretch(panel.cols, _PANEL_WIDTH, min_width), _stretch(panel.rows, _PANEL_HEIGHT, _MIN_HEIGHT)


def _stretch(intervals: Sequence[Interval], length: float, least: float) -> list[float]:
    whole = sum(stop - start for start, stop in intervals)
    return [max(least, length * (stop - start) / whole) for start, stop in intervals]


def _panel(
    shards: ShardMap, panel: Panel, left: float, top: float, widths: list[float], heights: list[float]
) -> list[Rectangle | Label]:
    shapes: list[Rectangle | Label] = []
    if panel.title:
        shapes.append(Label(left, top + _LINE / 2, panel.title, 12, "start", bold=True))
    grid_left, grid_top = left + _AXIS_WIDTH, top + _LINE + _AXIS_HEIGHT
    x = grid_left
    for col, width in zip(panel.cols, widths, strict=True):
        if panel.col_dim is not None:
            shapes.append(Label(x + width / 2, grid_top - _AXIS_HEIGHT / 2, span(col), 11))
        x += width
    if panel.col_dim is not None:
        shapes.append(Label(grid_left - 6, grid_top - _AXIS_HEIGHT / 2, f"dim {panel.col_dim}", 11, "end"))
    y = grid_top
    for row, height, cells in zip(panel.rows, heights, panel.cells, strict=True):
        if panel.row_dim is not None:
            shapes.append(Label(grid_left - 6, y + height / 2, span(row), 11, "end"))
        x = grid_left
        for number, width in zip(cells, widths, strict=True):
            shapes += _cell(shards, number, x, y, width, height)
            x += width
        y += height
    if panel.row_dim is not None:
        shapes.append(Label(left, grid_top + sum(heights) + 9, f"rows: dim {panel.row_dim}", 10, "start"))
    return shapes


def _cell(
    shards: ShardMap, number: int, x: float, y: float, width: float, height: float
) -> list[Rectangle | Label]:
    piece = shards.pieces[number]
    color = piece_color(number)
    where = " ".join(f"dim {dim} {span(interval)}" for dim, interval in enumerate(piece.box)) or "a scalar"
    box = Rectangle(x, y, width, height, color, f"rank {piece.ranks}: {where}")
    return [box, Label(x + width / 2, y + height / 2, piece.ranks, 12, color=text_color(color))]
