"""A slow rank is named once, on every rank alike, though all steps take the same time."""

import socket

import pytest
import torch.distributed as dist

from longmesh.train.stragglers import Stragglers, find_slow


@pytest.mark.parametrize(
    ("busy", "slow"),
    [
        ([1.0, 1.0], []),
        ([1.0, 1.6], [1]),
        ([1.6, 1.0], [0]),
        ([1.0, 1.4, 1.2], []),
        ([1.0, 1.0, 1.51, 3.0], [2, 3]),
        ([0.0001, 0.001], []),
        ([0.0, 0.1], [1]),
    ],
)
def test_slow_is_one_and_a_half_times_the_median(busy, slow):
    assert find_slow(busy) == slow


def compare(seconds: list[float], num_steps: int) -> list[str]:
    stragglers = Stragglers(every=3)
    for step in range(num_steps):
        stragglers.add(step, seconds[dist.get_rank()])
    return stragglers.lines


def test_a_slow_rank_is_named_once_with_its_host(pool):
    line = (
        f"rank 1 on host {socket.gethostname()} is slow: it computes 0.9 s a step where the median is 0.4 s (2.2 "
        "times, up to step 3); the others wait for it"
    )
    assert pool.run(compare, [0.4, 0.9, 0.5], 9, ranks=3) == [[line.replace("0.4 s (2.2", "0.5 s (1.8")]] * 3
    assert pool.run(compare, [0.4, 0.9], 7, ranks=2) == [[line]] * 2
    assert pool.run(compare, [0.4, 0.4], 9, ranks=2) == [[]] * 2
