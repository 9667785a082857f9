"""Ranks that are stopped (SIGSTOP, Ctrl-Z) or do not start, by the launcher's own clock.

The watchdog inside the ranks counts how long one waits for another. While ranks start, nobody waits yet: a rank that is
stuck there would be noticed late. The launcher sees a stopped process in /proc, and who has not spoken on the board.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from longmesh.cli.arguments import DEFAULT_TIMEOUT_S
from longmesh.watch.thread import Board, Finding
from longmesh.watch.thread.findings import find_idle
from longmesh.watch.thread.status import STOPPED, UNSTARTED, RankStatus

LOOK_S = 0.25
REPORT_AFTER_S = 300.0
# What passes between two looks counts for no more: the launcher may have been stopped itself.
LONGEST_LOOK_S = 1.0


class WaitLimits(NamedTuple):
    """Seconds that a rank may keep others waiting in a collective before it is named, and before the run ends.

    `stopped_after`: that it may be stopped before the run ends, whether others wait for it or not.
    """

    report_after: float = REPORT_AFTER_S
    end_after: float | None = None
    stopped_after: float | None = None

    @staticmethod
    def of(timeout: float | None) -> WaitLimits:
        """Those of a command's `--timeout`."""
        limit = timeout or DEFAULT_TIMEOUT_S
        return WaitLimits(min(REPORT_AFTER_S, limit), limit, limit)


class IdleRanks:
    """How long each rank has been stopped, or has not started."""

    def __init__(self, board: Board, num_ranks: int, limits: WaitLimits) -> None:
        self._board, self._num_ranks, self._limits = board, num_ranks, limits
        self._stopped: dict[int, float] = {}
        self._unstarted = dict.fromkeys(range(num_ranks), 0.0)
        self._told: set[int] = set()
        self._looked = time.monotonic()

    def look(self, pids: Mapping[int, int]) -> Finding | None:
        """The rank that was so for too long, if one was; before that, tells of one, once."""
        now = time.monotonic()
        passed = min(now - self._looked, LONGEST_LOOK_S)
        if passed < LOOK_S:
            return None
        self._looked = now
        stopped = [rank for rank, pid in pids.items() if is_stopped(pid)]
        self._stopped = {rank: self._stopped.get(rank, 0.0) + passed for rank in stopped}
        if self._unstarted:
            beats = {status.rank: status.beat for status in self._statuses()}
            self._unstarted = {
                rank: seconds + passed
                for rank, seconds in self._unstarted.items()
                if beats[rank] == 0 and rank in pids
            }
        limits = self._limits
        return self._judge(self._stopped, STOPPED, limits.stopped_after) or self._judge(
            self._unstarted, UNSTARTED, limits.end_after
        )

    def _judge(self, idle: Mapping[int, float], why: str, end_after: float | None) -> Finding | None:
        for rank, seconds in sorted(idle.items()):
            if end_after is not None and seconds >= end_after:
                return find_idle(self._statuses(), rank, why, seconds)
            if seconds >= self._limits.report_after and rank not in self._told:
                self._told.add(rank)
                finding = find_idle(self._statuses(), rank, why, seconds)
                print(finding.describe(), file=sys.stderr, flush=True)
        return None

    def _statuses(self) -> list[RankStatus]:
        texts = [self._board.read(f"rank{rank}") for rank in range(self._num_ranks)]
        return [RankStatus.parse(text) if text else RankStatus(rank) for rank, text in enumerate(texts)]


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, where the system tells; one in a debugger's hands is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False
