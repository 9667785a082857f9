"""A short walk of the trainer's state machine; tests/soak takes the long ones."""

import hypothesis
from hypothesis.stateful import run_state_machine_as_test

from support.train_faults import uninterrupted
from support.train_states import make_machine


def test_what_can_be_loaded_is_a_prefix_of_the_uninterrupted_run(pool, tmp_path):
    machine = make_machine(pool, uninterrupted(pool, tmp_path), tmp_path)
    few = hypothesis.settings(max_examples=2, stateful_step_count=5, derandomize=True, deadline=None)
    run_state_machine_as_test(machine, settings=few)
