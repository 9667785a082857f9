"""Whether a run that failed is started again, and with how many ranks. Pure but for the mark of the last checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from longmesh.cli.arguments import Launch

# A failure that comes again without a new checkpoint will come once more.
MAX_STALLED = 3


class Decision(NamedTuple):
    """Whether to continue, and what to say."""

    goes_on: bool
    why: str


class Restarts:
    """What became of the restarts so far."""

    def __init__(self, launch: Launch, mark: Callable[[], object] | None) -> None:
        self._launch, self._mark = launch, mark
        self.num_ranks = launch.ranks.most
        self.done = 0
        self._stalled = 0
        self._last_mark = None if mark is None else mark()
        self._last_rank: int | None = None

    def decide(self, failed_rank: int) -> Decision:
        """What to do after a failure that `failed_rank` caused; counts a restart if that is it."""
        mark = None if self._mark is None else self._mark()
        is_new = self._mark is not None and mark != self._last_mark
        self._last_mark = mark
        self._stalled = 0 if is_new or self._mark is None else self._stalled
        if self._stalled >= MAX_STALLED:
            return Decision(False, f"given up after {MAX_STALLED} restarts without a new checkpoint")
        if self.done >= self._launch.max_restarts:
            told = f"given up after {_count(self.done)}, as --max-restarts says" if self.done else ""
            return Decision(False, told)
        is_gone = failed_rank == self._last_rank and not is_new
        self._last_rank = failed_rank
        self.done, self._stalled = self.done + 1, self._stalled + 1
        words = f"restart {self.done} of {self._launch.max_restarts}"
        if is_gone and self.num_ranks > self._launch.ranks.least:
            self.num_ranks, self._last_rank = self.num_ranks - 1, None
            words += f", on {self.num_ranks} ranks: rank {failed_rank} failed twice"
        return Decision(True, words)


def _count(restarts: int) -> str:
    return "1 restart" if restarts == 1 else f"{restarts} restarts"
