"""`longmesh train` as a user types it, on local ranks; under torchrun: tests/soak/test_train_hosts.py."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TIMEOUT_S = 180
PYTHON = [sys.executable, "-m"]
SIZES = ["--seq-len", "251", "--dim", "16", "--steps", "8"]


def run(*command: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
    )


def losses(out: Path) -> list[float]:
    return json.loads((out / "run.json").read_text())["losses"]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A run on two ranks that was compared with one process; its directory and what it said."""
    out = tmp_path_factory.mktemp("train") / "out"
    done = run(*PYTHON, "longmesh", "train", "--ranks", 2, "--compare", *SIZES, "--out", out)
    assert done.returncode == 0, done.stderr
    return out, done


def test_it_trains_compares_and_says_so(compared: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    out, done = compared
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert all(line.startswith("[rank 0] ") for line in lines)
    step = r"\[rank 0\] 2 ranks: step 8/8  loss \d\.\d{4}  [\d,]+ tokens/s  rank 0 waits \d+%"
    assert sum(bool(re.fullmatch(step, line)) for line in lines) == 1
    told = r"\[rank 0\] largest difference from the one-process loss: (\S+) over 8 steps, within 1e-04"
    found = re.fullmatch(told, lines[-1])
    assert found
    difference = max(abs(a - b) for a, b in zip(losses(out), losses(out / "one-process"), strict=True))
    assert float(found.group(1)) == pytest.approx(difference, rel=0.05, abs=1e-12)
    assert difference < 1e-4
    order = [re.sub(r".*\] (\w+ \w+): step +(\d+)/.*", r"\1 \2", line) for line in lines if ": step " in line]
    assert order == [
        *(f"2 ranks {step}" for step in (1, 2, 3, 4)),
        *(f"one process {step}" for step in range(1, 9)),
        *(f"2 ranks {step}" for step in (5, 6, 7, 8)),
    ]
    assert (
        len(json.loads((out / "run.json").read_text())["step_seconds"]) == 6
    )  # without the first of each half
    assert not (out / "part.json").exists()
    assert lines[-4] == f"[rank 0] page: {out / 'report.html'}"
    assert "largest difference from the one-process loss" in (out / "report.html").read_text()


def test_an_earlier_run_is_not_replaced_without_a_word(
    compared: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    out, _ = compared
    page = (out / "report.html").read_text()
    done = run(*PYTHON, "longmesh", "train", "--ranks", 2, *SIZES, "--out", out)
    assert done.returncode == 2
    assert done.stderr.startswith(
        f"longmesh train: --out {out}: an earlier run has left checkpoints there, up"
    )
    done = run(*PYTHON, "longmesh", "train", *SIZES[:-1], 9, "--resume", "auto", "--out", out)
    assert done.returncode == 0, done.stderr
    assert f"[rank 0] the earlier run's page: {out / 'report-1.html'}" in done.stdout.splitlines()
    assert (out / "report-1.html").read_text() == page
    assert len(losses(out)) == 9
