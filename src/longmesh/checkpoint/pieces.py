"""The pieces of a checkpoint, tensors and other values as `torch.save` writes them, without running what they say.

A piece is a zip archive: a pickle, and the bytes of each tensor. torch reads it with an allow-list (`weights_only`);
here, what torch does not check is checked before: sizes that the archive claims, and the checksums in it.
"""

from __future__ import annotations

import io
import pickle
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

import numpy as np
import torch

from longmesh.checkpoint.pickled import list_names
from longmesh.errors import CheckpointError, LongmeshError

Allowed = Sequence[Callable[..., Any]]


class Refused(ValueError):
    """A piece that holds what may not be built from a file."""


class Part(io.RawIOBase):
    """`length` bytes of a file from `start` on, as a file."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        super().__init__()
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        size = max(0, min(len(view), self._length - self._at))
        self._file.seek(self._start + self._at)
        done = self._file.readinto(view[:size])  # type: ignore[attr-defined]
        self._at += done
        return done


def check_allowed(allow: Allowed) -> None:
    """Refuse what can't be allowed, before anything is read."""
    for item in allow:
        if not (callable(item) and hasattr(item, "__module__") and hasattr(item, "__qualname__")):
            raise LongmeshError(f"load(allow=...) takes classes, got {item!r}; write e.g. allow=[MyClass]")
        if item.__module__ in ("os", "posix", "nt", "sys"):
            name = f"{item.__module__}.{item.__qualname__}"
            raise LongmeshError(f"load(allow=...): {name} is never allowed; a checkpoint has no use for it")


def read_piece(file: IO[bytes], *, allow: Allowed = (), check_crc: bool) -> Any:
    """The value that `torch.save` wrote to `file`. Raises Refused, naming the class, before anything of it runs."""
    check_archive(file, check_crc=check_crc)
    file.seek(0)
    with _allowed(allow), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected pickle protocol")  # it is refused, by name
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise Refused(_describe_refusal(file, str(error))) from error


def check_archive(file: IO[bytes], *, check_crc: bool) -> None:
    """Every entry as it is in the file, none compressed: so none is larger than what is there."""
    size = file.seek(0, 2)
    file.seek(0)
    try:
        with zipfile.ZipFile(file) as archive:
            for entry in archive.infolist():
                plain = entry.compress_type == zipfile.ZIP_STORED and entry.file_size == entry.compress_size
                if not plain or entry.header_offset + entry.file_size > size:
                    raise CheckpointError(
                        f"{entry.filename!r} in it claims {entry.file_size} bytes of {size}"
                    )
                if check_crc and entry.CRC:  # 0 where torch was told to compute none
                    _read_through(archive, entry)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(str(error)) from error


def _read_through(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> None:
    with archive.open(entry) as stream:  # compares the checksum at the end
        while stream.read(1 << 20):
            pass


@contextmanager
def _allowed(allow: Allowed) -> Iterator[None]:
    """Beside what torch allows: plain containers, numpy's numbers and arrays, and what the caller names."""
    before = set(torch.serialization.get_safe_globals())
    with torch.serialization.safe_globals([x for x in (*_containers(), *allow) if x not in before]):
        yield


def _containers() -> list[Any]:
    scalar, array = np.float64(0).__reduce__()[0], np.zeros(0).__reduce__()[0]
    numbers = {type(np.dtype(kind)) for kind in "?bhilqBHILQefdgFDG"}
    before = [(scalar, "numpy.core.multiarray.scalar"), (array, "numpy.core.multiarray._reconstruct")]
    return [frozenset, range, slice, scalar, array, np.ndarray, np.dtype, *numbers, *before]


def _describe_refusal(file: IO[bytes], reason: str) -> str:
    """The names in a piece that are not allowed, or what else torch's reader did not take."""
    file.seek(0)
    try:
        with zipfile.ZipFile(file) as archive:
            pickled = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            data = archive.read(pickled)
    except (StopIteration, zipfile.BadZipFile):
        return reason.splitlines()[0]
    file.seek(0)
    try:
        names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    except pickle.UnpicklingError:
        names = []
    if not names:
        names = [name for name in list_names(data) if not name.startswith(("torch.", "collections."))]
    return ", ".join(names) if names else reason.splitlines()[0]
