"""What calls cost beside kernels and links is found from their times."""

import dataclasses

import numpy as np
import pytest

from longmesh.attention import masks, plan_attention
from longmesh.cli.doctor.fit_calls import fit, least_squares, reference_calls
from longmesh.cli.doctor.measure_links import Clock, find_disturbed
from longmesh.plan import named_cluster


def plans(cluster):
    return [
        plan_attention(
            seq_len=length, ranks=ranks, mask=mask, exchange=exchange, layout="zigzag", cluster=cluster
        )
        for length in (512, 1280)
        for ranks, exchange in ((4, "ring"), (4, "allgather"), ((4, 1), "ulysses"))
        for mask in (masks.full(), masks.causal())
    ]


@pytest.mark.parametrize("crowding", [1.0, 2.0])
@pytest.mark.parametrize(("pass_us", "transfer_us"), [(300.0, 90.0), (0.0, 500.0), (2000.0, 0.0)])
def test_figures_are_found_from_the_times_that_they_give(pass_us, transfer_us, crowding):
    bare = dataclasses.replace(named_cluster("cpu"), pass_us=0.0, transfer_us=0.0, crowding=crowding)
    machine = dataclasses.replace(bare, pass_us=pass_us, transfer_us=transfer_us)
    took = [plan.predict().total_us for plan in plans(machine)]
    assert fit(plans(bare), took) == pytest.approx([pass_us, transfer_us], abs=1e-3)


def test_calls_that_are_faster_than_their_parts_cost_nothing_besides():
    bare = plans(dataclasses.replace(named_cluster("cpu"), pass_us=0.0, transfer_us=0.0))
    assert fit(bare, [plan.predict().total_us * 0.8 for plan in bare]) == [0.0, 0.0]


def test_least_squares_stay_at_0_where_they_would_fall_below():
    a = np.array([[1.0, 1.0], [1.0, 2.0], [0.0, 1.0]])
    assert least_squares(a, a @ (3.0, 0.5)) == pytest.approx([3.0, 0.5])
    assert least_squares(a, np.array([2.0, 1.0, -1.0])) == pytest.approx([1.5, 0.0])
    assert least_squares(np.zeros((2, 2)), np.ones(2)) == [0.0, 0.0]


def test_calls_are_those_that_the_mesh_can_make_and_stay_short():
    def exchanges(*sizes):
        return {call.exchange for call in reference_calls(sizes, 128, 8)}

    assert exchanges(4) == {"allgather", "ring", "ulysses", "sparse"}
    assert exchanges(16) == {"allgather", "ring", "sparse"}  # 8 heads
    assert exchanges(2, 8) == {"hybrid"}
    assert exchanges(1) == exchanges(1, 1) == exchanges(2, 16) == exchanges(2, 2, 2) == set()
    assert max(call.length for call in reference_calls((1024,), 128, 8)) == 320 * 32


class ScriptedClock(Clock):
    """Gives times that are written down, a list for each call."""

    def __init__(self, *times: list[float]) -> None:
        self.times = [iter(column) for column in times]

    def best_us(self, makes):
        return [next(self.times[make()]) for make in makes]


def test_a_message_that_was_disturbed_is_measured_again():
    """A small message took longer than a large one, and went into the cluster."""
    calls = [lambda i=i: i for i in range(3)]
    assert ScriptedClock([900.0, 700.0, 40.0], [50.0], [800.0]).rising_us(calls) == [40.0, 50.0, 800.0]
    assert ScriptedClock([55.0], [50.0], [800.0]).rising_us(calls) == [55.0, 50.0, 800.0]  # as good as equal
    busy = ScriptedClock([900.0] * 99, [50.0] * 99, [800.0] * 99).rising_us(calls)
    assert busy == [900.0, 50.0, 800.0] and find_disturbed(busy) == [0]
