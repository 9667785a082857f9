"""The steps of a run as they become known, and as people see them.

A step's numbers are read when the next one is on its way. People see a bar that moves on a
terminal, else a line now and then.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress as Bar, TextColumn
from torch import nn

from longmesh.comm import World
from longmesh.train.number_checks import BadSteps, StepNumbers

LINES = 10
DEFAULT_WIDTH = 80


class StepRecord(NamedTuple):
    """A finished step."""

    step: int
    loss: float
    seconds: float
    wait_seconds: float


def say_nothing(record: StepRecord) -> None:
    """What ranks other than the first do with a finished step."""


@contextmanager
def progress(
    *, steps: int, step_tokens: int, num_ranks: int, terminal: str | None
) -> Iterator[Callable[[StepRecord], None]]:
    """A function that shows each finished step: on the terminal that is named, or on stdout."""
    with ExitStack() as stack:
        file = sys.stdout if terminal is None else stack.enter_context(open(terminal, "w"))
        bar = stack.enter_context(_bar(file)) if file.isatty() else None
        title = name_run(num_ranks)
        task = bar.add_task(title, total=steps, told="") if bar is not None else None

        def show(record: StepRecord) -> None:
            told = describe_step(record, steps, step_tokens, num_ranks)
            if bar is not None and task is not None:
                bar.update(task, completed=record.step + 1, told=told, refresh=True)
            elif record.step + 1 == steps or record.step % max(1, steps // LINES) == 0:
                print(f"{title}: {told}", flush=True)

        yield show


def _bar(file: TextIO) -> Bar:
    # The launcher's ranks are told a width without room for their prefix, which a bar has not.
    width = os.get_terminal_size(file.fileno()).columns or DEFAULT_WIDTH
    console = Console(file=file, force_terminal=True, width=width)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), TextColumn("{task.fields[told]}"))
    return Bar(*columns, console=console, expand=True, auto_refresh=False)


def name_run(num_ranks: int) -> str:
    """Who trains."""
    return f"{num_ranks} ranks" if num_ranks > 1 else "one process"


def describe_step(record: StepRecord, steps: int, step_tokens: int, num_ranks: int) -> str:
    """A step in one line. Ranks wait for different times, and only the first one's is known here."""
    rate, share = step_tokens / record.seconds, record.wait_seconds / record.seconds
    waits = f"  rank 0 waits {share:.0%}" if num_ranks > 1 else ""
    return f"step {record.step + 1:{len(str(steps))}d}/{steps}  loss {record.loss:.4f}  {rate:,.0f} tokens/s{waits}"


class _UnreadStep(NamedTuple):
    step: int
    numbers: StepNumbers
    seconds: float
    wait_seconds: float


class StepJournal:
    """Appends to `losses` and `steps`, shows each step, and reports skipped updates."""

    def __init__(
        self,
        model: nn.Module,
        losses: list[float],
        steps: list[StepRecord],
        show: Callable[[StepRecord], None],
    ) -> None:
        self._losses, self._steps, self._show = losses, steps, show
        self._bad = BadSteps([name for name, _ in model.named_parameters()])
        self._is_first = World().rank == 0
        self._pending: _UnreadStep | None = None

    def add(self, step: int, numbers: StepNumbers, seconds: float, wait_seconds: float) -> None:
        """A step that was begun; reads the one before. Every rank."""
        self.settle()
        self._pending = _UnreadStep(step, numbers, seconds, wait_seconds)

    def settle(self) -> None:
        """Read the numbers of the last step: before it is saved, and at the end. Every rank."""
        if self._pending is None:
            return
        (step, numbers, seconds, wait_seconds), self._pending = self._pending, None
        line = self._bad.read(step + 1, numbers)
        self._losses.append(float(numbers.loss))
        self._steps.append(StepRecord(step, self._losses[-1], seconds, wait_seconds))
        self._show(self._steps[-1])
        if line is not None and self._is_first:
            print(line, file=sys.stderr, flush=True)
