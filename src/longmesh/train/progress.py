"""Progress for people: a bar that moves on a terminal, else a line now and then."""

from __future__ import annotations

import contextlib
import os
import sys
from types import TracebackType
from typing import NamedTuple, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress as Bar, TextColumn

LINES = 10
DEFAULT_WIDTH = 80


class StepRecord(NamedTuple):
    """A finished step."""

    step: int
    loss: float
    seconds: float
    wait_seconds: float


class Progress:
    """Shows the steps of a run. Ranks other than the first make a silent one."""

    def __init__(
        self, *, steps: int, step_tokens: int, title: str, terminal: str | None, is_silent: bool
    ) -> None:
        self._steps, self._step_tokens, self._title = steps, step_tokens, title
        self._is_silent = is_silent
        self._terminal = terminal
        self._open = contextlib.ExitStack()
        self._bar: Bar | None = None

    def __enter__(self) -> Progress:
        if self._is_silent:
            return self
        file = self._find_terminal()
        if file is not None:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[told]}"),
            )
            # The launcher's ranks are told a width without room for their prefix, which a bar has not.
            width = os.get_terminal_size(file.fileno()).columns or DEFAULT_WIDTH
            console = Console(file=file, force_terminal=True, width=width)
            self._bar = self._open.enter_context(
                Bar(*columns, console=console, expand=True, auto_refresh=False)
            )
            self._task = self._bar.add_task(self._title, total=self._steps, told="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def _find_terminal(self) -> TextIO | None:
        """The terminal that the launcher named, or that this process writes to."""
        if self._terminal is not None:
            return self._open.enter_context(open(self._terminal, "w"))
        return sys.stdout if sys.stdout.isatty() else None

    def show(self, record: StepRecord) -> None:
        if self._is_silent:
            return
        told = describe_step(record, self._steps, self._step_tokens)
        if self._bar is not None:
            self._bar.update(self._task, completed=record.step + 1, told=told, refresh=True)
        elif record.step + 1 == self._steps or record.step % max(1, self._steps // LINES) == 0:
            print(f"{self._title}: {told}", flush=True)


def describe_step(record: StepRecord, steps: int, step_tokens: int) -> str:
    """A step in one line."""
    rate, share = step_tokens / record.seconds, record.wait_seconds / record.seconds
    return (
        f"step {record.step + 1:{len(str(steps))}d}/{steps}  loss {record.loss:.4f}  {rate:,.0f} tokens/s  "
        f"{share:.0%} in communication"
    )
