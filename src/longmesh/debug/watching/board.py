"""Where ranks post their statuses: a directory of the launcher, or the world's store (see watch.py)."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Protocol


class Board(Protocol):
    """Short texts under names, seen by all ranks."""

    def write(self, name: str, text: str) -> None: ...

    def read(self, name: str) -> str | None: ...

    def claim(self, name: str, text: str) -> bool:
        """Write it if nobody has; whether it was us."""
        ...

    def remove(self, name: str) -> None: ...


class FileBoard:
    """A directory; a text is replaced in one step."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)

    def write(self, name: str, text: str) -> None:
        with contextlib.suppress(OSError):  # the launcher has left and taken the directory with it
            fresh = self._directory / f"{name}.{os.getpid()}"
            fresh.write_text(text)
            fresh.replace(self._directory / name)

    def read(self, name: str) -> str | None:
        try:
            return (self._directory / name).read_text()
        except OSError:
            return None

    def claim(self, name: str, text: str) -> bool:
        try:
            with (self._directory / name).open("x") as file:
                file.write(text)
        except OSError:
            return False
        return True

    def remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            (self._directory / name).unlink()
