"""Where ranks post their statuses: a directory of the launcher, or the world's store (see watch.py)."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from .stacks import format_places, parse_dump
from .status import RankStatus, catches

STACK_SIGNAL = signal.SIGUSR2
ANSWER_S = 0.3


class Board(Protocol):
    """Short texts under names, seen by all ranks."""

    def write(self, name: str, text: str) -> None: ...

    def read(self, name: str) -> str | None: ...

    def claim(self, name: str, text: str) -> bool:
        """Write it if nobody has; whether it was us."""
        ...

    def remove(self, name: str) -> None: ...

    def ask_for_stack(self, status: RankStatus) -> RankStatus:
        """The status of a rank that is silent, with its stack if there is a way to it, else with none."""
        ...


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

    def ask_for_stack(self, status: RankStatus) -> RankStatus:
        """By a signal, whose handler is faulthandler's and needs no lock: it runs in the thread that it interrupts."""
        lines: list[str] = []
        if status.pid and catches(status.pid, STACK_SIGNAL):
            with contextlib.suppress(OSError):
                os.kill(status.pid, STACK_SIGNAL)
                time.sleep(ANSWER_S)
                stacks = parse_dump((self._directory / f"stack{status.rank}").read_text())
                lines = [line for stack in stacks[-1:] for line in format_places(stack)]
        return replace(status, stack=lines)
