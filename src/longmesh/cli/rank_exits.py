"""Which rank of a run failed first, and how to say it.

Two kinds of exit are told apart: ranks that wrote down their exception and its time, and ranks that were killed or left
without a word, which their peers may notice before the launcher does. Ranks that the launcher ended are not among them.

A rank that ended by a signal without a word: what its last lines and faulthandler's dump say, in words.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from longmesh.watch.thread.stacks import find_wait, format_places, parse_dump

_GLOO_SIZES = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")
_WHAT = re.compile(r"what\(\):\s+(.*)")
_MAX_WHAT = 200


class Crash(NamedTuple):
    """One line, which may be empty, and the Python stack, innermost first."""

    message: str
    stack: str


def read_crash(dump: Path, last_errors: str) -> Crash:
    """What is known of the crash of a rank."""
    stacks = parse_dump(dump.read_text(errors="replace")) if dump.exists() else []
    waits = [wait for stack in stacks if (wait := find_wait(stack)) is not None]
    # The thread that waits for others, else the main one, which is dumped last.
    shown = next((s for s in stacks if find_wait(s) is not None), stacks[-1] if stacks else [])
    words = [f"it was in {waits[0]}"] if waits else []
    sizes, what = _GLOO_SIZES.search(last_errors), _WHAT.search(last_errors)
    if "gloo::EnforceNotMet" in last_errors and sizes is not None:
        words.append(
            f"gloo received {sizes[1]} bytes where {sizes[2]} were expected, so another rank came to another "
            "collective or has a tensor of another shape or element type there; longmesh.watch.desync_check() stops "
            "where ranks part ways"
        )
    elif what is not None:
        words.append(what[1][:_MAX_WHAT])
    return Crash("; ".join(words), "\n".join(f"  {line}" for line in format_places(shown)))


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
