"""A shard map in the terminal: one table per panel, a cell for each piece with the ranks that hold it."""

from __future__ import annotations

import io

from rich.box import ROUNDED, SQUARE
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from longmesh.debug.picture import piece_color, text_color
from longmesh.debug.shard_map import Panel, ShardMap, panels, span

_AS_WIDE_AS_NEEDED = 100_000


def render_text(shards: ShardMap, header: str, *, use_rich: bool) -> str:
    """The map as text, as wide as it needs; with `use_rich` in colours, as escape codes of a terminal."""
    console = Console(
        file=io.StringIO(),
        force_terminal=use_rich,
        color_system="truecolor" if use_rich else None,
        width=_AS_WIDE_AS_NEEDED,
        legacy_windows=False,
    )
    for part in _parts(shards, header, use_rich):
        console.print(part, markup=False, highlight=False)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _parts(shards: ShardMap, header: str, use_rich: bool) -> list[RenderableType]:
    lines: list[RenderableType] = [Text(header, style="bold")] if header else []
    lines += [Text(line) for line in shards.summary]
    if not shards.pieces:
        return [*lines, Text("no elements")]
    return [*lines, *(_table(shards, panel, use_rich) for panel in panels(shards))]


def _table(shards: ShardMap, panel: Panel, use_rich: bool) -> Table:
    table = Table(
        title=panel.title or None,
        title_justify="left",
        box=ROUNDED if use_rich else SQUARE,
        show_lines=True,
        show_header=panel.col_dim is not None,
    )
    corner = "" if panel.row_dim is None else f"dim {panel.row_dim} \\ dim {panel.col_dim}"
    if panel.row_dim is not None:
        table.add_column(corner, no_wrap=True)
    for col in panel.cols:
        name = span(col) if panel.row_dim is not None else f"dim {panel.col_dim} {span(col)}"
        table.add_column(name, justify="center")
    for row, cells in zip(panel.rows, panel.cells, strict=True):
        head = [] if panel.row_dim is None else [Text(span(row))]
        table.add_row(*head, *(_cell(shards, number, use_rich) for number in cells))
    return table


def _cell(shards: ShardMap, number: int, use_rich: bool) -> Text:
    text = shards.pieces[number].ranks
    if not use_rich:
        return Text(text)
    color = piece_color(number)
    return Text(f" {text} ", style=f"{text_color(color)} on {color}")
