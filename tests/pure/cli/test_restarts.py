"""When a run is started again, on how many ranks, and when it is given up."""

import os

from longmesh.cli.arguments import Launch, RankRange
from longmesh.cli.restarts import Restarts
from longmesh.cli.train import fit_mesh, mark_of


def restarts(max_restarts: int, least: int = 4, marks: list[int] | None = None) -> Restarts:
    left = iter(marks or [])
    return Restarts(
        Launch(RankRange(least, 4), max_restarts=max_restarts), None if marks is None else lambda: next(left)
    )


def test_as_often_as_was_said():
    found = restarts(2)
    assert [found.decide(rank) for rank in (0, 1, 2)] == [
        (True, "restart 1 of 2"),
        (True, "restart 2 of 2"),
        (False, "given up after 2 restarts, as --max-restarts says"),
    ]
    assert restarts(0).decide(0) == (False, "")


def test_three_times_without_a_new_checkpoint():
    found = restarts(9, marks=[0, 0, 0, 0, 0])
    assert [found.decide(rank).goes_on for rank in (0, 1, 0, 1)] == [True, True, True, False]
    found = restarts(9, marks=[0, 0, 0, 1, 1, 1, 1])
    decisions = [found.decide(rank) for rank in (0, 1, 0, 1, 0, 1)]
    assert [d.goes_on for d in decisions] == [True, True, True, True, True, False]
    assert decisions[-1].why == "given up after 3 restarts without a new checkpoint"


def test_a_rank_that_fails_twice_is_left_out():
    found = restarts(9, least=3)
    whys = [found.decide(3).why for _ in range(4)]
    assert whys[:2] == ["restart 1 of 9", "restart 2 of 9, on 3 ranks: rank 3 failed twice"]
    assert found.num_ranks == 3
    assert "ranks" not in whys[2] + whys[3]  # no fewer than was said
    progressing = restarts(9, least=1, marks=[0, 1, 2, 3])
    assert [progressing.decide(3).goes_on for _ in range(3)] == [True] * 3
    assert progressing.num_ranks == 4


def test_the_mesh_that_fits():
    told = {"data": 2, "tensor": 2}
    assert [list(fit_mesh(n, told).values()) for n in (8, 4, 3, 6, 2, 1)] == [
        [2, 2, 2],
        [2, 1, 2],
        [1, 3, 1],
        [1, 3, 2],
        [1, 1, 2],
        [1, 1, 1],
    ]
    assert fit_mesh(3, {}) == {"data": 1, "context": 3, "tensor": 1}


def test_only_whole_checkpoints_are_progress(tmp_path):
    assert mark_of(tmp_path) is None

    def write(name):
        (tmp_path / "checkpoint" / name).mkdir(parents=True)
        (tmp_path / "checkpoint" / name / ".metadata").touch()
        os.utime(tmp_path / "checkpoint" / name / ".metadata", (10, 10))  # all in one tick of a coarse clock

    write(".step-00000002.saving")  # left by a save that was killed just before its end
    (tmp_path / "checkpoint" / "step-00000001").mkdir()
    (tmp_path / "checkpoint" / "step-00000001" / ".metadata").symlink_to("gone")  # as if it was just removed
    assert mark_of(tmp_path) is None
    write("step-00000002")
    first = mark_of(tmp_path)
    write("step-00000004")
    assert first is not None and mark_of(tmp_path) != first
