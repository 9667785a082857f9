"""visualize_sharding: who holds what of a DTensor, as a table in the terminal or as a picture."""

from __future__ import annotations

import io
import os

from rich.box import ROUNDED, SQUARE
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from longmesh.debug.shard_map import Panel, ShardMap, panels, shard_map, span
from longmesh.debug.shard_picture import (
    check_picture_path,
    draw_shards,
    piece_color,
    text_color,
    write_picture,
)
from longmesh.errors import LongmeshError
from longmesh.tensor import DTensor

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


def visualize_sharding(
    dtensor: DTensor, header: str = "", use_rich: bool = False, *, path: str | os.PathLike[str] | None = None
) -> None:
    r"""Show which rank holds which part of `dtensor`, whatever its number of dims and mesh axes.

    Prints a table, in colours with `use_rich`; with `path` (.svg) it draws a picture there instead.
    Only the rank at coordinate (0, 0, ...) of the mesh prints or writes. Local: sends nothing.

    >>> visualize_sharding(distribute_tensor(torch.ones(5, 4), mesh, [Shard(0)]))
    shape (5, 4), S(0) on MeshShape((2,))
    ┌───────────────┬───────┐
    │ dim 0 \ dim 1 │ [0:4) │
    ├───────────────┼───────┤
    │ [0:3)         │   0   │
    ├───────────────┼───────┤
    │ [3:5)         │   1   │
    └───────────────┴───────┘
    """
    if not isinstance(dtensor, DTensor):
        raise LongmeshError(
            f"visualize_sharding shows a longmesh DTensor, got {type(dtensor).__name__}; make one with "
            "distribute_tensor or DTensor.from_local"
        )
    if path is not None:
        check_picture_path(path)
    mesh = dtensor.device_mesh
    shards = shard_map(dtensor._layout, dtensor.shape, mesh.mesh.flatten().tolist())
    if any(mesh.get_coordinate() or ()):
        return
    if path is None:
        print(render_text(shards, header, use_rich=use_rich), end="")
    else:
        write_picture(draw_shards(shards, header), path)
