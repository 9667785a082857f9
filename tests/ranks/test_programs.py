"""A fixed choice of random programs; `make soak` runs as many as are asked for."""

from dataclasses import replace

import pytest

from fuzz.judge import Outcome, judge, shrink
from fuzz.programs import Program, write_program

SEEDS = range(18)
PARTS = 3


@pytest.mark.filterwarnings("ignore")  # of torch's, on what the statements use
@pytest.mark.parametrize("part", range(PARTS))
def test_programs_do_on_ranks_what_they_do_on_plain_tensors(pool, part):
    kinds = []
    for seed in SEEDS[part::PARTS]:
        program = write_program(seed, wide=part > 0)
        assert 5 <= len(program.statements) <= 25
        outcome = judge(program, pool)
        assert not outcome.is_failure, f"{outcome}\n{program}"
        kinds.append(outcome.kind)
    assert kinds.count("right") >= len(kinds) - 1


# Found by longer runs.
WRONG_ONCE = {
    "a shape changed in place, compiled": (
        "t0 = put(normal(642, (3, 4)), 'S0')",
        "t1 = t0 - t0",
        "t2 = through_full(t1, 'S1') * t1",
        "t2.unsqueeze_(0)",
        "t3 = compiled(lambda x, y: torch.where(x > 0, x, y), t2, t1[-1])",
    ),
    "a copy of an expanded tensor": (
        "t0 = put(normal(655, (3,)), 'S0')",
        "t1 = copy.deepcopy(t0.expand(2, 3).t())",
        "t1[:, ::2] = 0.5",
    ),
    "a copy on the same memory": (
        "t0 = put(normal(720, (2, 3, 4)), 'S2')",
        "t1 = t0.unfold(-1, 1, 1)",
        "t2 = copy.copy(t0.detach())",
        "t2[1] *= 0",
    ),
}


@pytest.mark.filterwarnings("ignore")  # of torch's compiler, on a gradient that is not kept
@pytest.mark.parametrize("statements", WRONG_ONCE.values(), ids=WRONG_ONCE)
def test_wrong_once(pool, statements):
    assert judge(Program(0, (2,), statements, each=True), pool) == Outcome("right")


def test_a_seed_is_a_program():
    assert write_program(7) == write_program(7)
    assert len({write_program(seed).mesh for seed in range(12)}) == 4


def program_of(*statements):
    return Program(0, (2,), statements, each=True)


PUT = "t0 = put(normal(1, (3, 2)), 'S0')"
ME = "torch.distributed.get_rank() if 'DTensor' in type(t0).__name__ else 0"


def test_outcomes_are_told_apart(pool):
    assert judge(program_of(PUT, "t1 = t0 + 1"), pool) == Outcome("right")
    wrong = judge(program_of(PUT, "t1 = t0 + ('DTensor' in type(t0).__name__)"), pool)
    assert (wrong.kind, wrong.where, wrong.text) == ("wrong", 1, "t1 differs by 1")
    crash = judge(program_of(PUT, "t1 = t0 + 1 if 'DTensor' not in type(t0).__name__ else 1 / 0"), pool)
    assert (crash.kind, crash.where) == ("crash", 1)
    assert crash.text == "ZeroDivisionError: division by zero"
    refused = judge(program_of(PUT, "t1 = put(t0.detach() + 0, 'S1')"), pool)
    assert refused.kind == "refused"
    alone = judge(program_of(PUT, f"t1 = t0 + 1 / (1 - ({ME}))"), pool, patience=1.0)
    assert alone.kind == "alone"
    assert "rank 1 raised AssertionError: alone at statement 1: ZeroDivisionError" in alone.text


def test_a_failing_program_is_made_short(pool):
    program = program_of(PUT, "t1 = t0.exp()", "t2 = t0 + ('DTensor' in type(t0).__name__)", "t3 = t1 * 2")
    outcome = judge(program, pool)
    assert (outcome.kind, outcome.where) == ("wrong", 2)
    shorter, same = shrink(program, outcome, pool)
    assert shorter == replace(program, statements=(program.statements[0], program.statements[2]))
    assert (same.kind, same.where) == ("wrong", 1)
