"""Files that appear whole or not at all, and errors of a disk in words.

Why a write failed, in words: where, why, how many bytes are needed and how many are free.

Replacing a file or directory as a whole: what is at `target` is the old one or the new one, never a part.

    .name.saving      being written
    name              the checkpoint
    .name.previous    only while two renames stand in for an exchange, on file systems without one

A save that is cut off leaves `.name.saving`, which the next one removes.
"""

from __future__ import annotations

import ctypes
import errno
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


_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def staging_path(target: Path) -> Path:
    """Where the successor of `target` is written: beside it, on the same file system."""
    return target.parent / f".{target.name}.saving"


def backup_path(target: Path) -> Path:
    return target.parent / f".{target.name}.previous"


def readable_path(target: Path) -> Path:
    """`target`, or what it was when a replacement was cut off between its two renames."""
    return backup_path(target) if not target.exists() and backup_path(target).exists() else target


def remove(path: Path) -> None:
    """Remove a file or directory, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def replace_with_staged(target: Path, *, can_exchange: bool = True) -> None:
    """Put what was staged at `target`'s place, and remove what was there."""
    staged = staging_path(target)
    _sync_tree(staged)
    if staged.is_file() and not target.is_dir():
        os.replace(staged, target)
    elif not target.exists():
        os.rename(staged, target)
    elif not (can_exchange and _exchange(staged, target)):
        remove(backup_path(target))
        os.rename(target, backup_path(target))
        os.rename(staged, target)
    _sync(target.parent)
    remove(staged)
    remove(backup_path(target))


def _exchange(one: Path, other: Path) -> bool:
    """Swap two paths in one step; False where the system or the file system can't."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV):
        return False
    raise OSError(code, os.strerror(code), os.fspath(other))


def _sync_tree(path: Path) -> None:
    """Bring a file, or a directory and the files in it, to the disk."""
    if path.is_dir():
        for child in path.iterdir():
            _sync(child)
    _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
