"""Hundreds of faults: no state is lost, nothing hangs, no process is left behind."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hypothesis
import pytest
from hypothesis.stateful import run_state_machine_as_test

from longmesh.testing import RankPool
from support.fault_matrix import matrix
from support.faults import Fault, can_mount, check, run_before, run_with
from support.train_faults import live_through, uninterrupted
from support.train_states import make_machine

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="states and orphans are read from /proc")
PARTS, FAULTS_A_PART = 10, 50
LANES = 6  # runs beside each other: a fault is mostly waiting


@pytest.fixture(scope="module")
def pools():
    found = [RankPool(3) for _ in range(LANES)]
    yield found
    for pool in found:
        pool.close()


@pytest.fixture(scope="module")
def expected(pools, tmp_path_factory):
    return uninterrupted(pools[0], tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("part", range(PARTS))
def test_random_faults(part, pools, expected, tmp_path):
    """500 in all; `-k "faults and 3"` runs the fourth part alone."""
    shares = [FAULTS_A_PART // LANES + (lane < FAULTS_A_PART % LANES) for lane in range(LANES)]
    with ThreadPoolExecutor(LANES) as threads:
        lanes = [
            threads.submit(live_through, pool, tmp_path, expected, f"{part}.{lane}", share)
            for lane, (pool, share) in enumerate(zip(pools, shares, strict=True))
        ]
        found = [lane.result() for lane in lanes]
    num_faults, num_ends = (sum(numbers) for numbers in zip(*found, strict=True))
    print(f"part {part}: {num_faults} faults, {num_ends} runs came to their end")
    assert num_faults >= FAULTS_A_PART and num_ends >= LANES


def test_long_walks_of_the_state_machine(pool, tmp_path):
    machine = make_machine(pool, uninterrupted(pool, tmp_path), tmp_path)
    many = hypothesis.settings(max_examples=30, stateful_step_count=10, deadline=None)
    run_state_machine_as_test(machine, settings=many)


@pytest.fixture(scope="module")
def before(tmp_path_factory) -> Path:
    return run_before(tmp_path_factory.mktemp("before") / "out")


@pytest.mark.parametrize("fault", matrix(), ids=lambda fault: fault.name)
def test_every_row_of_the_matrix(fault: Fault, before: Path, tmp_path: Path) -> None:
    if fault.own_disk and not can_mount():
        pytest.skip("a disk of its own needs the right to mount one")
    check(fault, run_with(fault, tmp_path / "out", before))


def test_a_rank_that_is_gone_for_good_is_left_out(tmp_path: Path) -> None:
    """Rank 2 dies each time it starts; two ranks go on from what three have saved."""
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert run_with(Fault("nothing", "nowhere", 0, ""), whole).code == 0
    assert run_with(Fault("SIGKILL", "step", 0, "", rank=2, ranks=3, skip=3), out).code == 137
    options = ("--ranks", "2:3", "--max-restarts", "3", "--resume", "auto")
    again = Fault("SIGKILL", "start", 0, "", rank=2, ranks=3, options=options, again=True)
    outcome = run_with(again, out)
    assert outcome.code == 0, outcome
    assert outcome.last_line == "longmesh train: restart 2 of 3, on 2 ranks: rank 2 failed twice"
    found, expected = (json.loads((path / "run.json").read_text())["losses"] for path in (out, whole))
    assert len(found) == len(expected)
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-5
