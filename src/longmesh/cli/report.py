"""Which rank of a run failed first, and how to say it.

Three kinds of exit come back from the launcher: ranks that wrote down their exception and its time; ranks
that were killed or left without a word, which their peers noticed afterwards; and ranks that the launcher
ended because of another one. Only the first two can be the cause.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

# The launcher notices a silent death after the peers did: by its polling interval, and some.
_NOTICE_NS = 5 * 10**9
_MAX_LINE = 160


@dataclass(frozen=True)
class RankExit:
    """How a rank ended: its exit code (or minus a signal) and, if recorded, its exception."""

    rank: int
    code: int
    message: str
    traceback: str
    time_ns: int
    recorded: bool

    @property
    def exit_code(self) -> int:
        """What a shell would show."""
        return self.code if self.code >= 0 else 128 - self.code

    def describe(self) -> str:
        if self.code < 0:
            return f"was killed by {signal.Signals(-self.code).name}"
        if self.traceback:
            line = self.message.splitlines()[0]
            return f"raised {line if len(line) <= _MAX_LINE else line[:_MAX_LINE] + '...'}"
        return f"left with exit code {self.code}"


def find_first(exits: Sequence[RankExit]) -> RankExit:
    """The exit that caused the others; of equal exceptions, that of the lowest rank."""
    # The launcher reports in the order it noticed, so the first is none that it ended itself.
    candidates = [e for i, e in enumerate(exits) if i == 0 or e.recorded or e.code != -signal.SIGTERM]
    first = min(candidates, key=lambda e: (e.time_ns - (0 if e.recorded else _NOTICE_NS), e.rank))
    alike = [e for e in candidates if (e.code, e.message) == (first.code, first.message)]
    return min(alike, key=lambda e: e.rank)


def describe_exits(exits: Sequence[RankExit], num_ranks: int) -> str:
    """The report: what failed first, what followed, and the first one's traceback last."""
    first = find_first(exits)
    lines = [f"longmesh run: rank {first.rank} of {num_ranks} {first.describe()}"]
    others = [e for e in exits if e.rank != first.rank and e.code != -signal.SIGTERM]
    others.sort(key=lambda e: e.rank)
    alike = [str(e.rank) for e in others if e.describe() == first.describe()]
    if alike:
        lines.append(f"  likewise on rank {', '.join(alike)}")
    lines += [f"  then rank {e.rank} {e.describe()}" for e in others if e.describe() != first.describe()]
    if first.traceback:
        lines += ["", first.traceback.rstrip()]
    return "\n".join(lines)
