"""Colours that tell many pieces apart: hues a golden angle apart, so neighbours differ."""

from __future__ import annotations

import colorsys

_GOLDEN = 0.618033988749895


def piece_color(number: int) -> str:
    """The colour of piece `number`, as `#rrggbb`."""
    light = 0.72 if number % 2 == 0 else 0.6
    rgb = colorsys.hls_to_rgb((0.58 + number * _GOLDEN) % 1.0, light, 0.62)
    return "#" + "".join(f"{round(part * 255):02x}" for part in rgb)


def text_color(background: str) -> str:
    """Black or white, whichever reads better on `background`."""
    red, green, blue = (int(background[i : i + 2], 16) for i in (1, 3, 5))
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"
