"""The thread that watches a rank from inside: it posts where the rank is, and speaks when others keep it waiting.

The clock is how long this rank has been waiting in one collective. At `report_after` seconds the first rank to get
there looks at what all ranks post, names the one that keeps them waiting, and, at `end_after`, ends the run.

A call that lasts is told from many short ones at the same place by its frame: from half of the limit on the frame is
held, so that a later call can't be the same object. Pitfall: code that keeps Python's lock stops this thread, too; the
rank is then silent, and on a local run its stack is asked for by a signal (see board.py).
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from .board import Board
from .findings import Finding, find_stuck
from .stacks import Wait, describe_wait, find_wait, format_places, places_of, read_frames
from .status import RankStatus

THREAD_NAME = "longmesh watch"
TIMED_OUT = 124  # what `timeout` of coreutils leaves with
LONGEST_BEAT_S = 0.5
# A store whose host is stopped does not answer; one that is gone may have ended because of what its host told.
SILENT_S, GONE_S = 2.0, 30.0
# What a rank that looks into a wait writes on the board: others leave it to that one, and post their stacks.
TELLING, ENDING = "telling", "ending"


@dataclass
class WatchLimits:
    """Seconds of waiting after which a rank reports, and ends the run; None: never. A section has a name and an end."""

    report_after: float
    end_after: float | None
    section: str | None = None
    started: float = 0.0

    @property
    def left(self) -> float:
        if self.section is None:
            return 0.0
        return max(0.0, self.started + (self.end_after or self.report_after) - time.monotonic())


class Watcher(threading.Thread):
    """Watches this process's threads; `tell` gets a report, `end` the report that ends the run."""

    def __init__(
        self,
        board: Board,
        rank: int,
        num_ranks: int,
        *,
        report_after: float,
        end_after: float | None,
        tell: Callable[[Finding], None],
        end: Callable[[Finding], None],
    ) -> None:
        super().__init__(name=THREAD_NAME, daemon=True)
        self.limits = WatchLimits(report_after, end_after)
        self.last: Callable[[], str] | None = None  # the last collective, where someone notes it
        self._board, self._rank, self._num_ranks = board, rank, num_ranks
        self._tell, self._end = tell, end
        self._done = threading.Event()
        self._wait: Wait | None = None
        self._since = time.monotonic()
        self._signature: tuple[tuple[int, int], ...] = ()
        self._held: FrameType | None = None
        self._seen: Wait | None = None
        self._told = False
        self._beat = 0
        self._lost: str | None = None
        self._lost_s = GONE_S
        self._processor: dict[int, int] = {}

    # -- for the program that is watched -------------------------------------------------------------

    @contextmanager
    def limited(
        self, report_after: float, end_after: float | None, section: str | None = None
    ) -> Iterator[None]:
        """Inside, other limits hold."""
        before = self.limits
        self.limits = WatchLimits(report_after, end_after, section, time.monotonic())
        try:
            yield
        finally:
            self.limits = before

    def stop(self) -> None:
        self._done.set()
        self.join(timeout=2.0)

    # -- the thread ----------------------------------------------------------------------------------

    def run(self) -> None:
        self._step()
        while not self._done.wait(self._interval):
            self._step()

    def _step(self) -> None:
        """One beat. A function of its own, so that no frame is held while the thread sleeps."""
        limits = self.limits
        frames = self._look()
        waited = time.monotonic() - self._since
        if self._lost is not None:
            # Its host may have left because of what it found; then that is being told.
            if (
                self._wait is not None
                and limits.end_after is not None
                and waited >= limits.end_after + self._lost_s
            ):
                self._end(Finding(0, f"{self._lost}; rank {self._rank} waits in {self._wait}", ()))
            return
        try:
            self._post(frames)
            if self._wait is None:
                self._forget()
                return
            if limits.end_after is not None and waited >= limits.end_after:
                self._investigate(ENDING, self._end)
            elif waited >= limits.report_after and not self._told:
                self._investigate(TELLING, self._tell)
        except RuntimeError as error:
            host = "rank 0, or the launcher: whoever hosts the world's store is stopped or gone"
            self._lost = f"{host} ({str(error).splitlines()[0]})"
            self._lost_s = SILENT_S if "no answer" in str(error) else GONE_S

    def _forget(self) -> None:
        if self._told:
            self._told = False
            self._board.remove(TELLING)

    @property
    def _interval(self) -> float:
        return min(LONGEST_BEAT_S, self.limits.report_after / 8, (self.limits.end_after or 8.0) / 8)

    def _look(self) -> list[FrameType]:
        """The frames of the thread that waits, or of the main one; keeps the clock of a wait."""
        stacks = sys._current_frames()
        stacks.pop(self.ident or 0)  # our own frame would hold itself, and all others with it
        main = threading.main_thread().ident or 0
        order = [main, *(ident for ident in stacks if ident != main)]
        wait, frames = None, []
        for ident in order:
            frames = read_frames(stacks.get(ident))
            wait = find_wait(places_of(frames), sleeps=ident == main and self._sleeps())
            if wait is not None:
                break
        else:
            frames = read_frames(stacks.get(main))
        signature = tuple((id(frame), frame.f_lasti) for frame in frames[:8]) if wait else ()
        is_other = self._held is not None and (not frames or self._held is not frames[0])
        if signature != self._signature or is_other:
            self._signature, self._since, self._held = signature, time.monotonic(), None
        elif wait is not None and time.monotonic() - self._since > self.limits.report_after / 2:
            self._held = frames[0]
        lasts = wait is not None and time.monotonic() - self._since >= self._interval
        self._wait = describe_wait(frames, wait) if wait is not None and lasts else wait
        self._seen = self._wait or self._seen
        return frames

    def _sleeps(self) -> bool:
        """Whether the main thread has used no processor since the last look."""
        thread = threading.main_thread().native_id
        try:
            with open(f"/proc/self/task/{thread}/stat") as file:
                words = file.read().rpartition(")")[2].split()
        except OSError:
            return False
        used, before = int(words[11]) + int(words[12]), self._processor.get(0)
        self._processor[0] = used
        return words[0] == "S" and used == before

    def _post(self, frames: list[FrameType]) -> None:
        self._board.write(f"rank{self._rank}", self._status(frames).to_json())

    def _status(self, frames: list[FrameType]) -> RankStatus:
        self._beat += 1
        limits = self.limits
        last = self.last() if self.last is not None else self._seen and str(self._seen)
        is_asked = any(self._board.read(name) is not None for name in (TELLING, ENDING))
        stack = format_places(places_of(frames)) if is_asked else []
        return RankStatus(
            self._rank,
            self._beat,
            socket.gethostname(),
            os.getpid(),
            waits_in=str(self._wait) if self._wait else None,
            ranks=self._wait.ranks if self._wait else (),
            seconds=time.monotonic() - self._since,
            last=last or None,
            section=limits.section,
            left=limits.left,
            stack=stack,
        )

    def _investigate(self, name: str, tell: Callable[[Finding], None]) -> None:
        """Name the rank that keeps us waiting, if no other rank does so already."""
        if not self._board.claim(name, str(self._rank)):
            return
        before = self._statuses()
        until = time.monotonic() + max(1.0, 2.5 * self._interval)
        while time.monotonic() < until and self._wait is not None:
            time.sleep(self._interval)
            self._post(self._look())
        if self._wait is not None:
            after = self._statuses()
            fresh = frozenset(a.rank for a, b in zip(after, before, strict=True) if a.beat != b.beat)
            if name == ENDING:
                after = [s if s.rank in fresh else self._board.ask_for_stack(s) for s in after]
            finding = find_stuck(after, fresh, self._rank)
            if finding.patience == 0.0:
                self._told = True
                tell(finding)
                return
        self._board.remove(name)

    def _statuses(self) -> list[RankStatus]:
        texts = [self._board.read(f"rank{rank}") for rank in range(self._num_ranks)]
        return [RankStatus.parse(text) if text else RankStatus(rank) for rank, text in enumerate(texts)]
