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
SIZES = ["--seq-len", "251", "--dim", "16", "--steps", "4"]


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
    step = r"\[rank 0\] 2 ranks: step 4/4  loss \d\.\d{4}  [\d,]+ tokens/s  \d+% in communication"
    assert sum(bool(re.fullmatch(step, line)) for line in lines) == 1
    told = r"\[rank 0\] largest difference from the one-process loss: (\S+) over 4 steps, within 1e-04"
    found = re.fullmatch(told, lines[-1])
    assert found
    difference = max(abs(a - b) for a, b in zip(losses(out), losses(out / "one-process"), strict=True))
    assert float(found.group(1)) == pytest.approx(difference, rel=0.05, abs=1e-12)
    assert difference < 1e-4
    assert lines[-4] == f"[rank 0] page: {out / 'report.html'}"
    assert "largest difference from the one-process loss" in (out / "report.html").read_text()
