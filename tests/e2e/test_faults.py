"""Faults in real runs: each ends in time, names its cause in the last line, and leaves no process and no state behind.

A short choice of the matrix in support/fault_matrix.py; `make soak` runs all of it, `benchmarks/reliability.py`
measures it.
"""

import json
import sys
from pathlib import Path

import pytest

from support.fault_matrix import matrix
from support.faults import Fault, check, run_with

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="states and orphans are read from /proc")
CHOSEN = {
    ("launcher:SIGKILL", "start", 2),
    ("SIGKILL", "group", 3),
    ("SIGSTOP", "backward", 2),
}
CHOICE = [fault for fault in matrix() if (fault.what, fault.point, fault.ranks) in CHOSEN]


def losses(out: Path) -> list[float]:
    return json.loads((out / "run.json").read_text())["losses"]


@pytest.mark.parametrize("fault", CHOICE, ids=lambda fault: fault.name)
def test_a_fault_ends_the_run_in_time(fault: Fault, tmp_path: Path) -> None:
    check(fault, run_with(fault, tmp_path / "out"))


def test_the_matrix_has_every_kind_of_fault_at_its_points() -> None:
    rows = matrix()
    assert len(rows) == len({fault.name for fault in rows}) > 60
    assert len(CHOICE) == len(CHOSEN)
    assert {fault.ranks for fault in rows} == {2, 3}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to."""
    out = tmp_path_factory.mktemp("whole") / "out"
    outcome = run_with(Fault("SIGKILL", "nowhere", 0, ""), out)
    assert outcome.code == 0, outcome
    return out


def test_a_run_that_was_stopped_and_restarted_is_the_same_to_the_bit(whole: Path, tmp_path: Path) -> None:
    """Stopped by a signal to a rank, resumed, and restarted after a rank was killed."""
    out = tmp_path / "out"
    (stopped,) = (fault for fault in matrix() if (fault.what, fault.point) == ("SIGUSR1", "step"))
    check(stopped, run_with(stopped, out))
    out.with_suffix(".fault").unlink()  # it says that the fault has happened; the next run has another
    options = ("--resume", "auto", "--max-restarts", "1")
    outcome = run_with(Fault("SIGKILL", "step", 0, "", skip=2, options=options), out)
    assert outcome.code == 0, outcome
    assert outcome.last_line == "longmesh train: restart 1 of 1"
    assert losses(out) == losses(whole)


def test_restarts_without_a_new_checkpoint_are_given_up(tmp_path: Path) -> None:
    fault = Fault("SIGKILL", "start", 137, "", options=("--max-restarts", "9"), again=True)
    outcome = run_with(fault, tmp_path / "out")
    assert outcome.code == 137
    assert outcome.last_line == "longmesh train: given up after 3 restarts without a new checkpoint"
    assert outcome.err.count("was killed by SIGKILL") == 4
