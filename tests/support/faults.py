"""A fault in a real run of `longmesh train`: what was put in where, how the run ended, and after how many seconds.

The rows of the matrix are in support/fault_matrix.py, what is put into a rank in support/injection.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from longmesh.checkpoint.directory_reader import find_damage
from longmesh.checkpoint.generations import generation_path, list_steps
from support.processes import is_alive
from support.sockets import children

INJECTION = Path(__file__).parent / "injection"
SIZES = ["--seq-len", "64", "--dim", "16", "--layers", "1", "--threads", "1"]
SAVE_EVERY = 2
LIMIT_S = 3.0
START_S = 240.0
# A bound for a hang: that it is within 5 s on a machine with nothing else to do is measured by the benchmark.
ENDING_S = 30.0
# A disk of its own, of a few MB, that nobody else sees; what was saved there is copied out of it at the end.
OWN_DISK = (
    'mount -t tmpfs -o size=4m none "$1" || exit 99; out=$1; shift; "$@"; code=$?; cp -r "$out/." "$out.kept"; '
    "exit $code"
)


@dataclass(frozen=True)
class Fault:
    """`what` happens to `rank` when it comes to `point` once more after `skip` times; the run ends with `code`.

    `said` is the last line, `seen` is anywhere in the output. `limit` is what the watchdog waits before it speaks: the
    run ends 5 s after that. `kept` is the newest step that must be there afterwards, whole. With `resumed` the run goes
    on from one of 4 steps, with `again` it happens each time from there on.
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
    seen: str = ""
    kept: int | None = None
    steps: int = 6
    resumed: bool = False
    again: bool = False
    own_disk: bool = False

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
    steps: tuple[int, ...]
    damage: tuple[str, ...]

    @property
    def last_line(self) -> str:
        lines = [line for line in self.err.splitlines() if not line.startswith("[rank ")]
        return lines[-1] if lines else ""


@cache
def can_mount() -> bool:
    """Whether a process may have a disk of its own here."""
    enter = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", "mount -t tmpfs none /tmp"]
    try:
        return subprocess.run(enter, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def run_with(fault: Fault, out: Path, before: Path | None = None) -> Outcome:
    """Run the trainer on real ranks with a fault in it, to its end. `before` is what a resumed run goes on from."""
    out.mkdir(parents=True, exist_ok=True)
    if fault.resumed:
        assert before is not None, "a run of 4 steps to go on from"
        shutil.copytree(before, out, dirs_exist_ok=True)
    marker = out.with_suffix(".fault")
    told = {"rank": fault.rank, "point": fault.point, "skip": fault.skip, "fault": fault.what}
    told |= {"file": str(marker), "again": fault.again, "out": str(out)}
    path = os.pathsep.join([str(INJECTION), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "LONGMESH_FAULT": json.dumps(told)}
    files = [out.with_suffix(f".{name}") for name in ("stdout", "stderr")]
    with open(files[0], "w") as stdout, open(files[1], "w") as stderr:
        launcher = subprocess.Popen(_command(fault, out), stdout=stdout, stderr=stderr, env=env)
    seconds, left = _wait(launcher, marker)
    texts = [file.read_text() for file in files]
    kept = (out.with_suffix(".kept") if fault.own_disk else out) / "checkpoint"
    steps = list_steps(kept)
    damage = [found for step in steps for found in find_damage(generation_path(kept, step))]
    return Outcome(launcher.returncode, *texts, seconds, left, tuple(steps), tuple(damage))


def _command(fault: Fault, out: Path) -> list[str]:
    resume = ["--resume", "auto"] if fault.resumed else []
    told = ["--steps", str(fault.steps), "--save-every", str(SAVE_EVERY), "--timeout", str(LIMIT_S), *resume]
    train = [sys.executable, "-m", "longmesh", "train", "--ranks", str(fault.ranks), *SIZES, *told]
    train += ["--out", str(out), *fault.options]
    if not fault.own_disk:
        return train
    return ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", OWN_DISK, "-", str(out), *train]


def _wait(launcher: subprocess.Popen[bytes], marker: Path) -> tuple[float, list[int]]:
    """Wait until launcher and ranks are gone: the seconds since it happened, and who is not gone."""
    family: set[int] = set()
    deadline = time.monotonic() + START_S
    try:
        while launcher.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                family.update(children(launcher.pid)[1:])
            time.sleep(0.05)
        ended = launcher.poll() is not None
        happened = float(marker.read_text()) if marker.exists() else time.time()
        while any(is_alive(pid) for pid in family) and time.time() < happened + ENDING_S and ended:
            time.sleep(0.02)
        seconds = time.time() - happened
    finally:
        left = [pid for pid in family if is_alive(pid)]
        for pid in [launcher.pid, *left]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        launcher.wait()
    return seconds, left


def run_before(out: Path) -> Path:
    """A run of 4 steps that nothing happened to."""
    outcome = run_with(Fault("nothing", "nowhere", 0, "", steps=4), out)
    assert outcome.code == 0, outcome
    return out


def check(fault: Fault, outcome: Outcome) -> None:
    told = f"{fault.name}: {outcome}"
    assert outcome.code == fault.code, told
    assert outcome.left == [], told
    expected = fault.said.format(rank=fault.rank, ranks=fault.ranks)
    assert re.match(expected, outcome.last_line) or not expected, told
    assert re.search(fault.seen.format(rank=fault.rank, ranks=fault.ranks), outcome.out + outcome.err), told
    assert outcome.seconds < fault.limit + ENDING_S or fault.code == 0, told
    assert outcome.damage == () or fault.what == "flip", told
    assert fault.kept is None or fault.kept in outcome.steps, told
