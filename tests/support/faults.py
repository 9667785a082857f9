"""A fault in a real run of `longmesh train`: what was put in where, how the run ended, and after how many seconds."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from support.processes import is_alive
from support.sockets import children

INJECTION = Path(__file__).parent / "injection"
SIZES = ["--seq-len", "64", "--dim", "16", "--layers", "1", "--threads", "1"]
LIMIT_S = 3.0
START_S = 240.0
# A bound for a hang: that it is within 5 s on a machine with nothing else to do is measured by the benchmark.
ENDING_S = 30.0


@dataclass(frozen=True)
class Fault:
    """`what` happens to `rank` when it comes to `point` once more after `skip` times; the run ends with `code`.

    `said` is the last line. `limit` is what the watchdog waits before it speaks: the run ends 5 s after that.
    """

    what: str
    point: str
    code: int
    said: str
    rank: int = 1
    ranks: int = 2
    skip: int = 0
    limit: float = 0.0
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.what} of rank {self.rank} of {self.ranks} at {self.point}"


@dataclass(frozen=True)
class Outcome:
    """How a run with a fault ended; `seconds` after it happened. `left` are the processes that it left behind."""

    code: int
    out: str
    err: str
    seconds: float
    left: list[int]

    @property
    def last_line(self) -> str:
        lines = [line for line in self.err.splitlines() if not line.startswith("[rank ")]
        return lines[-1] if lines else ""


def run_with(fault: Fault, out: Path, steps: int = 6, again: bool = False) -> Outcome:
    """Run the trainer on real ranks with a fault in it, to its end."""
    marker = out.with_suffix(".fault")
    told = {"rank": fault.rank, "point": fault.point, "skip": fault.skip, "fault": fault.what}
    told |= {"file": str(marker), "again": again}
    command = [sys.executable, "-m", "longmesh", "train", "--ranks", str(fault.ranks), *SIZES]
    command += [
        "--steps",
        str(steps),
        "--save-every",
        "2",
        "--timeout",
        str(LIMIT_S),
        "--out",
        str(out),
        *fault.options,
    ]
    path = os.pathsep.join([str(INJECTION), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "LONGMESH_FAULT": json.dumps(told)}
    files = [out.with_suffix(f".{name}") for name in ("stdout", "stderr")]
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(files[0], "w") as stdout, open(files[1], "w") as stderr:
        launcher = subprocess.Popen(command, stdout=stdout, stderr=stderr, env=env)
    family: set[int] = set()
    deadline = time.monotonic() + START_S
    try:
        while launcher.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                family.update(children(launcher.pid)[1:])
            time.sleep(0.05)
        ended = launcher.poll() is not None
        happened = float(marker.read_text()) if marker.exists() else time.time()
        while any(is_alive(pid) for pid in family) and time.time() < happened + 30 and ended:
            time.sleep(0.02)
        seconds = time.time() - happened
    finally:
        left = [pid for pid in family if is_alive(pid)]
        for pid in [launcher.pid, *left]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        launcher.wait()
    texts = [file.read_text() for file in files]
    return Outcome(launcher.returncode, *texts, seconds, left)


KILLED = r"longmesh train: rank {rank} of {ranks} was killed by SIGKILL"
STOPPED = (
    r"longmesh train: rank {rank} \(host .*, pid \d+\) is stopped \(SIGSTOP, or Ctrl-Z\); rank \d has waited"
)
LOOPS = r"longmesh train: rank {rank} \(host .*, pid \d+\) is in no collective.* \(File .*sitecustomize.py.*, in act\)"
LOCKED = (
    r"longmesh train: rank {rank} \(host .*, pid \d+\) does not answer: it runs code that keeps Python's lock"
)
ASKED = r"longmesh train: stopped( by SIG\w+)? as asked; exit code 75: start it again to go on"
POINTS = ("start", "group", "step", "forward", "backward", "collective", "save", "write", "commit")
LONG = ("start", "group", "save", "write", "commit")  # with three times the limit


def _limit(point: str) -> float:
    return LIMIT_S * (3 if point in LONG else 1)


def kills() -> list[Fault]:
    """Ranks and launchers that are killed, at every point."""
    faults = []
    for point in POINTS:
        rank = 0 if point == "commit" else 1
        skip = 2 if point in ("step", "forward", "backward", "collective") else 0
        faults.append(Fault("SIGKILL", point, 137, KILLED, rank=rank, skip=skip))
        faults.append(Fault("launcher:SIGKILL", point, -9, "", rank=rank, skip=skip))
    faults += [
        Fault("SIGKILL", point, 137, KILLED, rank=0, ranks=3) for point in ("start", "group", "step", "save")
    ]
    return faults


def stuck() -> list[Fault]:
    """Ranks that are stopped or loop."""
    faults = []
    for point in ("start", "group", "step", "backward", "collective", "save"):
        skip = 2 if point in ("step", "backward", "collective") else 0
        for what, said in (("SIGSTOP", STOPPED), ("loop", LOOPS)):
            if (what, point) != ("loop", "start"):  # nothing of ours runs there yet
                faults.append(Fault(what, point, 124, said, skip=skip, limit=_limit(point)))
    faults.append(Fault("regex", "step", 124, LOCKED, skip=2, limit=LIMIT_S))
    faults.append(Fault("SIGSTOP", "step", 124, STOPPED, rank=2, ranks=3, skip=2, limit=LIMIT_S))
    return faults


def requests() -> list[Fault]:
    """Requests to stop, to a rank or to the launcher."""
    return [
        Fault(target + what, "step", 75, ASKED, rank=rank, skip=2)
        for target in ("", "launcher:")
        for what, rank in (("SIGTERM", 1), ("SIGINT", 0), ("SIGUSR1", 1))
    ]


def crashes() -> list[Fault]:
    """Ranks that raise, abort or break."""
    return [
        Fault(
            "raise", "step", 1, r"longmesh train: rank {rank} of {ranks} raised RuntimeError: a fault", skip=2
        ),
        Fault(
            "SIGABRT", "forward", 134, r"longmesh train: rank {rank} of {ranks} was killed by SIGABRT", skip=2
        ),
        Fault(
            "SIGSEGV",
            "backward",
            139,
            r"longmesh train: rank {rank} of {ranks} was killed by SIGSEGV",
            skip=2,
        ),
    ]


def matrix() -> list[Fault]:
    return [*kills(), *stuck(), *requests(), *crashes()]


def check(fault: Fault, outcome: Outcome) -> None:
    told = f"{fault.name}: {outcome}"
    assert outcome.code == fault.code, told
    assert outcome.left == [], told
    expected = fault.said.format(rank=fault.rank, ranks=fault.ranks)
    assert re.match(expected, outcome.last_line) or not expected, told
    assert outcome.seconds < fault.limit + ENDING_S, told
