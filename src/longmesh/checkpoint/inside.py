"""Files that an index names, found inside its directory only."""

from __future__ import annotations

import stat
from pathlib import Path

from longmesh.errors import CheckpointError

MOST_BYTES = 1 << 30  # of a description: those of thousands of ranks have some ten million


def read_inside(root: Path, name: str) -> bytes:
    """The bytes of a description `name` of the directory `root`, unless they are too many to be one."""
    path = find_inside(root, name)
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise CheckpointError(
            f"checkpoint {root} is refused: {name} has {size:,} bytes, and a description has at most {MOST_BYTES:,}"
        )
    return path.read_bytes()


def find_inside(root: Path, name: str) -> Path:
    """The file `name` of the directory `root`. Refuses one outside of it, and what is not a regular file.

    A link is followed if it stays inside, or goes where Hugging Face's cache keeps the files of its snapshots:
    models--x/snapshots/revision/model.safetensors -> models--x/blobs/3f2a...
    """
    path = root / name
    if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
        raise CheckpointError(
            f"checkpoint {root} is refused: its index names {name!r}, which is outside of its directory"
        )
    try:
        home, target = root.resolve(), path.resolve()
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"checkpoint {root} is refused: its file {name!r} can't be followed ({error})"
        ) from error
    blobs = home.parent.parent / "blobs"
    in_cache = home.parent.name == "snapshots" and target.parent == blobs
    if not (target.is_relative_to(home) or in_cache):
        raise CheckpointError(
            f"checkpoint {root} is refused: its file {name!r} is a link to {target}, which is outside of its "
            "directory; copy the file into it if you trust it"
        )
    try:
        mode = target.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"checkpoint {root} is damaged: {name} is missing") from error
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {root} can't be read: {name}: {error.strerror or error}"
        ) from error
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"checkpoint {root} is refused: {name!r} is not a regular file")
    return path
