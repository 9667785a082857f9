"""visualize_sharding: who holds what of a DTensor, in the terminal or as a picture."""

from __future__ import annotations

import os

from longmesh.debug.picture import check_picture_path, write_picture
from longmesh.debug.shard_map import shard_map
from longmesh.debug.shard_picture import draw_shards
from longmesh.debug.shard_text import render_text
from longmesh.errors import LongmeshError
from longmesh.tensor import DTensor


def visualize_sharding(
    dtensor: DTensor, header: str = "", use_rich: bool = False, *, path: str | os.PathLike[str] | None = None
) -> None:
    r"""Show which rank holds which part of `dtensor`, whatever its number of dims and mesh axes.

    Prints a table, in colours with `use_rich`; with `path` (.svg or .png) it draws a picture there instead.
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
