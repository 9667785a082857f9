"""Hundreds of faults: no state is lost, nothing hangs, no process is left behind."""

import sys
from pathlib import Path
from random import Random

import hypothesis
import pytest
from hypothesis.stateful import run_state_machine_as_test

from support.faults import Fault, check, matrix, run_with
from support.train_faults import POINTS, Life, RankFault, uninterrupted
from support.train_states import make_machine

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="states and orphans are read from /proc")
NUM_FAULTS = 500
KINDS = ["SIGKILL"] * 6 + ["raise"] * 2 + ["SIGABRT", "SIGSEGV", "SIGSTOP", "loop"]


def test_five_hundred_random_faults(pool, tmp_path):
    random, expected = Random(0), uninterrupted(pool, tmp_path)
    num_faults, num_ends = 0, 0
    while num_faults < NUM_FAULTS:
        life = Life(pool, tmp_path / f"life{num_ends}", expected)
        sizes = random.choice([[2], [3], [2, 3], [1, 2, 3]])
        is_done = False
        while not is_done:
            num_ranks = random.choice(sizes)
            what = random.choice(KINDS) if num_ranks > 1 else "SIGKILL"
            fault = RankFault(
                random.randrange(num_ranks), random.choice(sorted(POINTS)), random.randrange(4), what
            )
            is_done = life.go(num_ranks, fault if random.random() < 0.9 else None)
            num_faults += not is_done
            if not is_done and random.random() < 0.3:
                num_faults += life.damage(random)
        num_ends += 1
    print(f"{num_faults} faults, {num_ends} runs came to their end")
    assert num_ends > 0


def test_long_walks_of_the_state_machine(pool, tmp_path):
    machine = make_machine(pool, uninterrupted(pool, tmp_path), tmp_path)
    many = hypothesis.settings(max_examples=30, stateful_step_count=10, deadline=None)
    run_state_machine_as_test(machine, settings=many)


@pytest.mark.parametrize("fault", matrix(), ids=lambda fault: fault.name)
def test_every_row_of_the_matrix(fault: Fault, tmp_path: Path) -> None:
    check(fault, run_with(fault, tmp_path / "out"))
