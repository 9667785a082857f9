"""The plan of an expert layer: rows and bytes of every rank, from counts alone."""

import pytest

from longmesh.errors import LongmeshError
from longmesh.experts import plan_dispatch
from longmesh.plan import named_cluster

COUNTS = [[3, 0, 9, 1, 2], [4, 4, 0, 0, 7], [0, 0, 0, 0, 0]]


def test_rows_and_bytes_add_up():
    plan = plan_dispatch(COUNTS, mesh_sizes=(3,), row_bytes=8, axes=("ep",))
    assert plan.held == ((0, 2), (2, 2), (4, 1))
    assert [plan.sent_rows(rank) for rank in range(3)] == [(3, 10, 2), (8, 0, 7), (0, 0, 0)]
    assert [plan.received_rows(rank) for rank in range(3)] == [(3, 8, 0), (10, 0, 0), (2, 7, 0)]
    assert [plan.rows_of_experts(rank) for rank in range(3)] == [(7, 4), (9, 1), (9,)]
    assert [plan.bytes_sent(rank) for rank in range(3)] == [8 * (12 + 8), 8 * (15 + 10), 8 * 9]
    assert plan.bytes_by_axis() == {("ep",): 2 * 8 * 54 + 3 * plan.count_bytes}
    assert plan.predicted_us(named_cluster("h100")) > 0


def test_more_ranks_than_experts_and_two_axes():
    plan = plan_dispatch([[1, 2]] * 4, mesh_sizes=(2, 2), row_bytes=4)
    assert plan.held == ((0, 1), (1, 0), (1, 1), (2, 0))
    assert plan.received_rows(1) == (0, 0, 0, 0)


def test_it_explains_itself():
    text = plan_dispatch(COUNTS, mesh_sizes=(3,), row_bytes=8).explain()
    assert "   2  4:5                  0              9" in text and "busiest rank: 1.10 of the mean" in text
    empty = plan_dispatch([[0], [0]], mesh_sizes=(2,), row_bytes=8).explain()
    assert "none" in empty and "no token has an expert" in empty


def test_counts_of_other_ranks_are_refused():
    with pytest.raises(LongmeshError, match=r"counts of shape \(3, 5\) for a mesh of \(2,\)"):
        plan_dispatch(COUNTS, mesh_sizes=(2,), row_bytes=8)
