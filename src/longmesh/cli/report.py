"""Which rank of a run failed first, and how to say it.

Two kinds of exit are told apart: ranks that wrote down their exception and its time, and ranks that were killed or left
without a word, which their peers may notice before the launcher does. Ranks that the launcher ended are not among them.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

# A silent death is noticed later than peers wrote down what it did to them, by the launcher's interval and the load.
_NOTICE_NS = 2 * 10**9
_MAX_LINE = 160


@dataclass(frozen=True)
class RankExit:
    """How a rank ended: its exit code (or minus a signal) and, if recorded, its exception.

    `named` is the rank that a watchdog's record is about; a usage error is said as it is.
    """

    rank: int
    code: int
    message: str
    traceback: str
    time_ns: int
    recorded: bool
    named: int | None = None
    is_usage_error: bool = False

    @property
    def exit_code(self) -> int:
        """What a shell would show."""
        return self.code if self.code >= 0 else 128 - self.code

    def describe(self) -> str:
        if self.code < 0:
            crash = f": {self.message}" if self.message else ""
            return f"was killed by {signal.Signals(-self.code).name}{crash}"
        if self.named is not None:
            return f"named rank {self.named}"
        if self.traceback:
            line = self.message.splitlines()[0]
            return f"raised {line if len(line) <= _MAX_LINE else line[:_MAX_LINE] + '...'}"
        return f"left with exit code {self.code}"


def find_first(exits: Sequence[RankExit]) -> RankExit:
    """The exit that caused the others; of equal exceptions, that of the lowest rank."""
    first = min(exits, key=lambda e: e.time_ns - (0 if e.recorded else _NOTICE_NS))
    alike = [e for e in exits if e.recorded and (e.code, e.message) == (first.code, first.message)]
    return min([first, *alike], key=lambda e: e.rank)


def describe_exits(exits: Sequence[RankExit], num_ranks: int, command: str = "longmesh run") -> str:
    """The report: what followed, the traceback of what failed first, and last the line that says what it was."""
    first = find_first(exits)
    if first.is_usage_error:
        return f"{command}: {first.message}"
    others = sorted((e for e in exits if e.rank != first.rank), key=lambda e: e.rank)
    alike = [str(e.rank) for e in others if e.describe() == first.describe()]
    lines = [f"  later rank {e.rank} {e.describe()}" for e in others if e.describe() != first.describe()]
    if alike:
        lines.append(f"  likewise rank {', '.join(alike)}")
    if first.traceback:
        lines += ["", first.traceback.rstrip(), ""]
    if first.named is not None:
        return "\n".join([*lines, f"{command}: {first.message}"])
    return "\n".join([*lines, f"{command}: rank {first.rank} of {num_ranks} {first.describe()}"])
