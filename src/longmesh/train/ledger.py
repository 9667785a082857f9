"""The steps of a run as they become known: a step's numbers are read when the next one is on its way."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from longmesh.comm import World
from longmesh.train.bad_numbers import BadSteps, StepNumbers
from longmesh.train.progress import StepRecord


class _Pending(NamedTuple):
    step: int
    numbers: StepNumbers
    seconds: float
    wait_seconds: float


class Ledger:
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
        self._pending: _Pending | None = None

    def add(self, step: int, numbers: StepNumbers, seconds: float, wait_seconds: float) -> None:
        """A step that was begun; reads the one before. Every rank."""
        self.settle()
        self._pending = _Pending(step, numbers, seconds, wait_seconds)

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
