"""A directory of checkpoints on real ranks: beside the training, failures of one rank, other numbers of ranks."""

import errno
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from longmesh import Partial, Replicate, Shard, distribute_tensor
from longmesh.checkpoint import Directory, background
from longmesh.checkpoint.generations import generation_path
from longmesh.comm import World, record_comm
from longmesh.errors import CheckpointError
from longmesh.testing import RankError, cpu_mesh


def state(value, dim=0):
    mesh = cpu_mesh(dist.get_world_size())
    whole = torch.arange(35.0).view(7, 5) + value
    return {
        "w": distribute_tensor(whole, mesh, [Shard(dim)], src_data_rank=None),
        "copy": distribute_tensor(whole, mesh, [Replicate()], src_data_rank=None),
        "plain": torch.full((3,), float(value)),
        "step": value,
    }


def save_some(path, steps, pause=0.0):
    lines = []
    directory = Directory(path, keep=2, tell=lines.append)
    for step in steps:
        directory.save(state(step), step)
        for _ in range(3):
            directory.poll()
            time.sleep(pause)
    directory.flush()
    return directory.steps(), lines


def load_one(path, dim=0):
    """Which step was loaded, whether all of it is right, and what was told."""
    lines = []
    found = state(-1, dim)
    step = Directory(path, tell=lines.append).load_latest(found)
    whole = torch.arange(35.0).view(7, 5) + (step or 0)
    right = torch.equal(found["w"].full_tensor(), whole) and torch.equal(found["copy"].full_tensor(), whole)
    right = right and found["plain"].tolist() == [step] * 3 and found["step"] == step
    return step, right, lines


def drop_while_saving(path):
    lines = []
    directory = Directory(path, tell=lines.append)
    directory.save(state(7), 7)
    directory._job.wait()
    del directory
    return lines, os.listdir(path)


def test_a_save_that_nobody_waited_for_is_told(pool, tmp_path):
    first, second = pool.run(drop_while_saving, str(tmp_path), ranks=2)
    saved = tmp_path / "step-00000007"
    text = f"{saved} is incomplete, because nothing waited for it: call flush() on every rank at the end"
    assert first[0] == [text] and second[0] == []
    assert "step-00000007" not in first[1]


@pytest.mark.parametrize("pause", [0.0, 0.01])
def test_saved_on_some_ranks_and_loaded_on_others(pool, tmp_path, pause):
    path = str(tmp_path / "run")
    assert pool.run(save_some, path, range(1, 5), pause, ranks=3) == [([3, 4], [])] * 3
    assert pool.run(load_one, path, 1, ranks=2) == [(4, True, [])] * 2
    assert pool.run(load_one, path, 1, ranks=1) == [(4, True, [])]
    assert sorted(os.listdir(path)) == ["step-00000003", "step-00000004"]
    parts = sorted(os.listdir(generation_path(Path(path), 4)))
    assert parts == [".longmesh.json", ".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp"]


def test_a_damaged_part_of_one_rank_is_passed_over_by_all(pool, tmp_path):
    path = tmp_path / "run"
    pool.run(save_some, str(path), range(1, 4), ranks=3)
    os.truncate(generation_path(path, 3) / "__2_0.distcp", 50)
    first, second = pool.run(load_one, str(path), ranks=2)
    assert first[:2] == second[:2] == (2, True)
    assert second[2] == [], "one rank tells"
    (line,) = first[2]
    assert "__2_0.distcp was cut off: a piece ends at byte" in line and line.endswith(
        "; step 2 is used instead"
    )


def fail_on_one(path, failing_rank, phase):
    lines = []
    directory = Directory(path, max_failures=2, tell=lines.append)
    directory.save(state(1), 1)
    directory.flush()
    good = getattr(background, phase)
    if dist.get_rank() == failing_rank:

        def fail(*args, **kwargs):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        setattr(background, phase, fail)
    try:
        directory.save(state(2), 2)
        for _ in range(200):  # told by a poll, on all ranks in the same
            directory.poll()
            time.sleep(0.002)
        between = directory.steps(), list(lines)
        directory.save(state(3), 3)
        with pytest.raises(CheckpointError) as error:
            directory.flush()
    finally:
        setattr(background, phase, good)
    directory.save(state(4), 4)
    directory.flush()
    return between, str(error.value), directory.steps()


@pytest.mark.parametrize(
    ("failing_rank", "phase"), [(1, "write_pieces"), (0, "write_pieces"), (0, "replace_with_staged")]
)
def test_a_failure_of_one_rank_is_one_of_all(pool, tmp_path, failing_rank, phase):
    path = tmp_path / "run"
    results = pool.run(fail_on_one, str(path), failing_rank, phase, ranks=3, timeout=60)
    for number, ((steps, lines), error, final) in enumerate(results):
        assert steps == [1]
        assert final == [1, 4]
        assert error == results[0][1]
        assert error.endswith("2 saves in a row have failed; the newest checkpoint is that of step 1")
        assert [len(lines), "No space left on device" in error] == [number == 0, True]
    assert "step-00000002 could not be written: No space left on device" in results[0][0][1][0]
    assert sorted(os.listdir(path)) == ["step-00000001", "step-00000004"]


def refuse(path):
    directory = Directory(path)
    texts = []
    for _ in range(2):
        bad = state(1) | {"p": state(1)["w"].redistribute(placements=[Partial()])}
        with pytest.raises(CheckpointError) as error:
            directory.save(bad, 1)
        texts.append(str(error.value))
    directory.save(state(1), 1)
    directory.flush()
    return texts, directory.steps()


def test_a_state_that_can_not_be_saved_is_an_error_of_the_call(pool, tmp_path):
    for texts, steps in pool.run(refuse, str(tmp_path / "run"), ranks=2):
        assert texts[0] == texts[1] and texts[0].startswith(
            "'p': a tensor of layout P has a reduction pending"
        )
        assert steps == [1]


def count_collectives(path):
    """What is sent in the second save: one count when it begins, then one for each poll until all know."""
    directory = Directory(path)
    directory.save(state(1), 1)
    directory.flush()
    value = state(2)
    with record_comm() as begun:
        directory.save(value, 2)
    while not (Path(path) / ".step-00000002.saving" / f"__{dist.get_rank()}.written.json").exists():
        time.sleep(0.001)
    time.sleep(0.1)
    dist.barrier()
    with record_comm() as later:
        for _ in range(8):
            directory.poll()
            time.sleep(0.05)
            dist.barrier()
    steps = directory.steps()
    directory.flush()
    return begun.counts, later.counts, steps


def test_the_writer_calls_no_collective(pool, tmp_path):
    for begun, later, steps in pool.run(count_collectives, str(tmp_path / "run"), ranks=2, timeout=60):
        assert begun == {"all_reduce": 1}
        assert set(later) == {"all_reduce"} and 2 <= later["all_reduce"] <= 4, (
            "none when nothing is under way"
        )
        assert steps == [1, 2]


def die_while_saving(path, phase):
    directory = Directory(path)
    directory.save(state(1), 1)
    directory.flush()
    setattr(background, phase, lambda *args: os._exit(9) if dist.get_rank() == 0 else time.sleep(0.2))
    directory.save(state(2), 2)
    while True:
        directory.poll()
        time.sleep(0.01)


@pytest.mark.parametrize("phase", ["write_pieces", "replace_with_staged"])
def test_a_rank_that_dies_leaves_the_one_before(pool, tmp_path, phase):
    path = tmp_path / "run"
    with pytest.raises(RankError):
        pool.run(die_while_saving, str(path), phase, ranks=2, timeout=30)
    assert ".step-00000002.saving" in os.listdir(path)
    assert pool.run(load_one, str(path), ranks=2) == [(1, True, [])] * 2
    pool.run(save_some, str(path), [3], ranks=2)
    assert sorted(os.listdir(path)) == ["step-00000001", "step-00000003"]


def agree_on_little():
    world = World()
    counting = world.start_count([2, world.rank])
    texts = world.gather(f"rä{world.rank}" * world.rank)
    return world.count([1]), counting.result(), texts, world.gather(""), (world.rank, world.size)


def test_agreements_of_all_ranks(pool):
    results = pool.run(agree_on_little, ranks=3)
    for rank, result in enumerate(results):
        assert result == ([3], [6, 3], ["", "rä1", "rä2rä2"], ["", "", ""], (rank, 3))
    alone = World()
    assert (alone.count([4]), alone.gather("x"), alone.rank, alone.size) == ([4], ["x"], 0, 1)
