"""Pictures as values: rectangles and lines of text, written as SVG or PNG.

SVG is text that we write ourselves. PNG is drawn by matplotlib, which comes with the extra `plot`.
"""

from __future__ import annotations

import colorsys
import importlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape, quoteattr

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
    if suffix not in (".svg", ".png"):
        raise LongmeshError(f"a picture is written as .svg or .png, not as {suffix!r}: {os.fspath(path)}")


def write_picture(picture: Picture, path: str | os.PathLike[str]) -> None:
    """Write an `.svg` or `.png` file."""
    check_picture_path(path)
    if Path(path).suffix.lower() == ".svg":
        Path(path).write_text(to_svg(picture), encoding="utf-8")
    else:
        _write_png(picture, Path(path))


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


def _write_png(picture: Picture, path: Path) -> None:
    figures, patches = _matplotlib("matplotlib.figure"), _matplotlib("matplotlib.patches")
    dots = 100
    figure: Any = figures.Figure(figsize=(picture.width / dots, picture.height / dots), dpi=dots)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, picture.width), ylim=(picture.height, 0))
    axes.axis("off")
    align = {"start": "left", "middle": "center", "end": "right"}
    for shape in picture.shapes:
        if isinstance(shape, Rectangle):
            box = ((shape.x, shape.y), shape.width, shape.height)
            axes.add_patch(patches.Rectangle(*box, facecolor=shape.color, edgecolor="#333333", linewidth=1))
            continue
        axes.text(
            shape.x,
            shape.y,
            shape.text.replace("$", r"\$"),
            fontsize=shape.size * 72 / dots,
            color=shape.color,
            ha=align[shape.anchor],
            va="center",
            fontweight="bold" if shape.bold else "normal",
        )
    figure.savefig(path, dpi=dots)


def _matplotlib(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise LongmeshError(
            "a .png needs matplotlib: pip install 'longmesh[plot]', or write an .svg, which needs nothing"
        ) from error


def piece_color(number: int) -> str:
    """The colour of piece `number`, as `#rrggbb`: hues a golden angle apart, so neighbours differ."""
    light = 0.72 if number % 2 == 0 else 0.6
    rgb = colorsys.hls_to_rgb((0.58 + number * _GOLDEN) % 1.0, light, 0.62)
    return "#" + "".join(f"{round(part * 255):02x}" for part in rgb)


def text_color(background: str) -> str:
    """Black or white, whichever reads better on `background`."""
    red, green, blue = (int(background[i : i + 2], 16) for i in (1, 3, 5))
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"
