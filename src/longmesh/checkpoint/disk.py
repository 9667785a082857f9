"""Why a write failed, in words: where, why, how many bytes are needed and how many are free."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from longmesh.errors import CheckpointError


def free_bytes(path: Path) -> int | None:
    """What is free on the file system of `path`, or of its nearest parent that exists."""
    for place in (path, *path.parents):
        try:
            return shutil.disk_usage(place).free
        except OSError:
            continue
    return None


def describe_failure(error: OSError, target: Path, needed_bytes: int | None) -> str:
    """Why `target` could not be written."""
    reason = error.strerror or str(error)
    if error.filename is not None and Path(os.fsdecode(error.filename)) != target:
        reason = f"{reason}: {os.fsdecode(error.filename)}"
    free = free_bytes(target)
    needed = "" if needed_bytes is None else f"{needed_bytes:,} bytes are needed and "
    left = "" if free is None else f"{free:,} are free there" if needed else f"{free:,} bytes are free there"
    return f"{target} could not be written: {reason}; {needed}{left}".rstrip("; ")


def check_room(target: Path, needed_bytes: int) -> None:
    """Refuse to begin what can't be finished."""
    free = free_bytes(target.parent)
    if free is not None and free < needed_bytes:
        raise CheckpointError(
            f"{target} could not be written: {needed_bytes:,} bytes are needed and {free:,} are free there; make room, "
            "or keep fewer checkpoints"
        )


@contextmanager
def writing(target: Path, needed_bytes: int | None = None) -> Iterator[None]:
    """Raise what the file system refuses as a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(describe_failure(error, target, needed_bytes)) from error
