"""The pieces of a checkpoint, tensors and other values as `torch.save` writes them, without running what they say.

A piece is a zip archive: a pickle, and the bytes of each tensor. torch reads it with an allow-list (`weights_only`);
here, what torch does not check is checked before: sizes that the archive claims, and the checksums in it.
"""

from __future__ import annotations

import io
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

import numpy as np
import torch

from longmesh.checkpoint.calls import check_calls
from longmesh.checkpoint.pickled import NotPlain, list_names
from longmesh.errors import CheckpointError, LongmeshError

_ZIP = b"PK\x03\x04"  # torch takes anything else for a format of its own from before
_NAME_LENGTHS, _LOCAL_HEADER = (
    26,
    30,
)  # bytes from the start of an entry: to the lengths of its names, and to them
Allowed = Sequence[Callable[..., Any]]


class Refused(ValueError):
    """A piece that holds what may not be built from a file."""


class FilePart(io.RawIOBase):
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


def find_not_allowed(allow: Allowed) -> LongmeshError | None:
    """What can't be allowed, before anything is read."""
    for item in allow if isinstance(allow, Iterable) else (allow,):
        if not (callable(item) and hasattr(item, "__module__") and hasattr(item, "__qualname__")):
            return LongmeshError(f"load(allow=...) takes classes, got {item!r}; write e.g. allow=[MyClass]")
        if item.__module__ in ("os", "posix", "nt", "sys"):
            name = f"{item.__module__}.{item.__qualname__}"
            return LongmeshError(f"load(allow=...): {name} is never allowed; a checkpoint has no use for it")
    return None


def read_piece(file: IO[bytes], *, allow: Allowed = (), check_crc: bool) -> Any:
    """The value that `torch.save` wrote to `file`. Raises Refused, naming the class, before anything of it runs."""
    check_archive(file, check_crc=check_crc)
    pickled = _read_pickle(file)
    try:
        check_calls(pickled, file.seek(0, 2))
    except NotPlain as error:
        with _allowed(allow):
            names = _find_strange_names(file, pickled)
        raise (Refused(", ".join(names)) if names else error) from error
    file.seek(0)
    with _allowed(allow), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected pickle protocol")  # it is refused, by name
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            names = _find_strange_names(file, pickled) or [str(error).splitlines()[0]]
            raise Refused(", ".join(names)) from error


def check_archive(file: IO[bytes], *, check_crc: bool) -> None:
    """Every entry as it is in the file, none compressed: so none is larger than what is there."""
    size = file.seek(0, 2)
    file.seek(0)
    if file.read(len(_ZIP)) != _ZIP:
        raise CheckpointError("File is not a zip file")
    file.seek(0)
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            if len(names) != len(set(names)):
                raise CheckpointError("it has two entries of one name")
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


def _read_pickle(file: IO[bytes]) -> bytes:
    """The one pickle of a piece. Not by the archive's own reader: it wants a checksum where torch may write none."""
    file.seek(0)
    with zipfile.ZipFile(file) as archive:
        found = [entry for entry in archive.infolist() if entry.filename.rpartition("/")[2] == "data.pkl"]
    if len(found) != 1:
        raise CheckpointError(f"it has {len(found)} entries data.pkl")
    (entry,) = found
    file.seek(entry.header_offset + _NAME_LENGTHS)
    file.seek(entry.header_offset + _LOCAL_HEADER + sum(struct.unpack("<HH", file.read(4))))
    return file.read(entry.file_size)


def _find_strange_names(file: IO[bytes], pickled: bytes) -> list[str]:
    """The names in a piece that are not allowed, as far as they can be found."""
    file.seek(0)
    try:
        names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    except (pickle.UnpicklingError, RuntimeError, ValueError, LookupError):
        names = []
    return names or [
        n for n in list_names(pickled) if not n.startswith(("torch.", "collections.", "builtins."))
    ]
