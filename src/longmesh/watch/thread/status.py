"""What a rank says of itself, once in a while, where others can read it."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass, field
from pathlib import Path

STOPPED = "is stopped (SIGSTOP, or Ctrl-Z)"
UNHEARD = "has told nothing yet: it has not started, or has not come to watch()"
UNSTARTED = "has not come to its program: Python is still starting"
_STATES = {
    "T": STOPPED,
    "t": "is stopped by a debugger",
    "D": "does not answer: it waits for a disk or a network file system",
    "R": "does not answer: it runs code that keeps Python's lock",
    "S": "does not answer: it sleeps in code that keeps Python's lock",
    "Z": "has ended",
    "X": "has ended",
}


@dataclass(frozen=True)
class RankStatus:
    """Where a rank is. `beat` grows from status to status; `seconds` is how long it has been waiting, or computing.

    `waits_in` is the collective it waits in, with the ranks of its group; `last` the one before, if it does not wait.
    `left` are the seconds that its section still has, in which others have to be patient.
    """

    rank: int
    beat: int = 0
    host: str = ""
    pid: int = 0
    waits_in: str | None = None
    ranks: tuple[int, ...] = ()
    seconds: float = 0.0
    last: str | None = None
    section: str | None = None
    left: float = 0.0
    stack: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def parse(text: str) -> RankStatus:
        values = json.loads(text)
        return RankStatus(**{**values, "ranks": tuple(values["ranks"])})

    @property
    def name(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})" if self.pid else f"rank {self.rank}"


def catches(pid: int, signum: int) -> bool:
    """Whether a process has a handler for a signal, where the system tells."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(caught >> (signum - 1) & 1)


def describe_silence(status: RankStatus) -> str:
    """Why a rank says nothing, as far as its host is ours and tells."""
    if status.pid == 0:
        return UNHEARD
    if status.host != socket.gethostname() or not os.path.isdir("/proc/self"):
        return "does not answer: it is stopped, ended or cut off"
    try:
        state = Path(f"/proc/{status.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "has ended"
    if status.beat == 0 and state in "RSD":
        return UNSTARTED
    return _STATES.get(state, f"does not answer (state {state})")
