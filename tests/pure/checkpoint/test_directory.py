"""A directory of checkpoints in one process: what stays, what is passed over, what a failed save leaves."""

import contextlib
import errno
import os
import random
import shutil
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, strategies as st

from longmesh.checkpoint import Directory, background, directory as directory_module, load
from longmesh.checkpoint.generations import choose_removed, generation_path, list_steps, remove_garbage
from longmesh.comm import World
from longmesh.errors import CheckpointError, LongmeshError
from support.generations import failing, flip, loaded, opened, save_all, state

# -- what stays --------------------------------------------------------------------------------------


def test_the_last_ones_and_every_mth_stay(tmp_path):
    directory, lines = opened(tmp_path / "run", keep=2, keep_every=30)
    save_all(directory, range(10, 101, 10))
    assert directory.steps() == [30, 60, 90, 100]
    assert directory.latest() == 100
    assert sorted(os.listdir(tmp_path / "run")) == [f"step-{n:08}" for n in (30, 60, 90, 100)]
    assert loaded(directory) == (100, 100.0)
    assert lines == []


def test_three_stay_by_default(tmp_path):
    directory, _ = opened(tmp_path / "run")
    save_all(directory, range(5))
    assert directory.steps() == [2, 3, 4]


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=12, unique=True),
    st.integers(1, 4),
    st.integers(0, 10),
    st.data(),
)
def test_what_is_removed(order, keep, keep_every, data):
    newest = data.draw(st.sampled_from(order))
    gone = choose_removed(order, newest=newest, keep=keep, keep_every=keep_every)
    past = [*(step for step in order if step < newest), newest]
    assert set(gone) <= set(past) - {newest}
    assert not set(gone) & set(past[-keep:])
    for step in past[:-keep]:
        assert (step in gone) == (not keep_every or step % keep_every != 0)


# -- a run that begins anew where an earlier one got further ------------------------------------------


def test_a_run_that_began_anew_is_resumed_though_an_earlier_one_got_further(tmp_path):
    save_all(opened(tmp_path)[0], [10, 20, 30])
    again, _ = opened(tmp_path)
    save_all(again, [5])
    assert again.latest() == 5 and again.steps() == [5, 10, 20, 30]
    resumed, lines = opened(tmp_path)
    assert resumed.latest() == 5
    assert loaded(resumed) == (5, 5.0)
    save_all(resumed, [15])
    assert loaded(opened(tmp_path)[0]) == (15, 15.0)
    assert lines == []


def test_checkpoints_of_an_earlier_run_go_first(tmp_path):
    save_all(opened(tmp_path)[0], [10, 20, 30])
    again, _ = opened(tmp_path, keep=2)
    save_all(again, [12])
    assert again.steps() == [10, 12, 20, 30]
    save_all(again, [14])
    assert again.steps() == [12, 14, 20, 30]
    save_all(again, [40])
    assert again.steps() == [14, 40]


def test_an_earlier_run_is_used_if_all_of_the_last_one_is_damaged(tmp_path):
    save_all(opened(tmp_path)[0], [10, 20])
    save_all(opened(tmp_path)[0], [5])
    for name in (".metadata", "__0_0.distcp"):
        flip(generation_path(tmp_path, 5) / name)
        directory, lines = opened(tmp_path)
        assert loaded(directory) == (20, 20.0)
        assert len(lines) == 1 and "00000005" in lines[0] and lines[0].endswith("; step 20 is used instead")
    save_all(directory, [25])
    assert loaded(opened(tmp_path)[0]) == (25, 25.0)


def test_wrong_options_are_told(tmp_path):
    for options, text in [
        ({"keep": 0}, r"Directory\(keep=0\): give 1 or more"),
        ({"keep_every": -1}, r"Directory\(keep_every=-1\): give 0 or more"),
        ({"max_failures": 0}, r"Directory\(max_failures=0\): give 1 or more"),
    ]:
        with pytest.raises(LongmeshError, match=text):
            Directory(tmp_path, **options)
    with pytest.raises(LongmeshError, match="step=-1: a checkpoint's step is a whole number, 0 or more"):
        Directory(tmp_path).save(state(1), -1)


def test_an_empty_directory_has_nothing_to_load(tmp_path):
    directory, lines = opened(tmp_path / "run")
    assert directory.load_latest(state(0)) is None
    assert directory.latest() is None
    directory.flush()
    assert lines == []


def test_a_step_is_saved_again(tmp_path):
    directory, _ = opened(tmp_path / "run")
    save_all(directory, [1, 2])
    directory.save(state(7), 2)
    assert loaded(directory) == (2, 7.0)


def test_the_state_may_change_its_shape_between_saves(tmp_path):
    directory, _ = opened(tmp_path / "run")
    save_all(directory, [1])
    other = {"w": torch.ones(2, 2, dtype=torch.bfloat16), "new": "x"}
    directory.save(other, 2)
    found = {"w": torch.zeros(2, 2, dtype=torch.bfloat16), "new": ""}
    assert directory.load_latest(found) == 2
    assert found["w"].tolist() == [[1, 1], [1, 1]] and found["new"] == "x"


def test_what_is_changed_after_the_call_is_not_saved(tmp_path):
    directory, _ = opened(tmp_path / "run")
    for step in (1, 2, 3):  # the first makes the memory, the others use it again
        value = state(step)
        directory.save(value, step)
        value["w"].fill_(99)
        value["nested"]["n"][0] = 99
        value["nested"]["n"][1].fill_(99)
        assert loaded(directory) == (step, float(step))


def test_objects_with_a_state_dict_are_asked_for_it(tmp_path):
    directory, _ = opened(tmp_path / "run")
    for step in (1, 2):
        model = torch.nn.Linear(2, 2)
        directory.save({"model": model}, step)
        other = torch.nn.Linear(2, 2)
        assert directory.load_latest({"model": other}) == step
        assert torch.equal(model.weight, other.weight)


# -- damage and garbage ------------------------------------------------------------------------------


DAMAGES = {
    "flipped": (lambda p: flip(p / "__0_0.distcp"), "__0_0.distcp is not what was written"),
    "cut off": (
        lambda p: os.truncate(p / "__0_0.distcp", 100),
        "__0_0.distcp was cut off: a piece ends at byte",
    ),
    "file gone": (lambda p: (p / "__0_0.distcp").unlink(), "is damaged: __0_0.distcp is missing"),
    "description gone": (lambda p: (p / ".metadata").unlink(), "it has no file .metadata"),
    "description flipped": (lambda p: flip(p / ".metadata"), ".metadata is not what was written"),
    "checksums gone": (
        lambda p: (p / ".longmesh.json").unlink(),
        "its checksums, .longmesh.json, are missing",
    ),
    "empty": (lambda p: (shutil.rmtree(p), p.mkdir())[0], "it has no file .metadata"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_the_newest_whole_one_is_used_and_a_line_says_so(tmp_path, kind):
    damage, text = DAMAGES[kind]
    directory, lines = opened(tmp_path / "run")
    save_all(directory, [1, 2, 3])
    damage(generation_path(tmp_path / "run", 3))
    assert loaded(directory) == (2, 2.0)
    (line,) = lines
    assert text in line and line.endswith("; step 2 is used instead")
    damage(generation_path(tmp_path / "run", 2))
    directory, lines = opened(tmp_path / "run")
    assert loaded(directory) == (1, 1.0)
    assert len(lines) == 2
    damage(generation_path(tmp_path / "run", 1))
    with pytest.raises(
        CheckpointError, match=r"no checkpoint in .*run is complete:\n.*00000003.*\n.*00000002.*\n.*00000001"
    ):
        directory.load_latest(state(0))


def test_damaged_ones_do_not_count_among_those_that_stay(tmp_path):
    directory, _ = opened(tmp_path / "run", keep=2)
    save_all(directory, [10, 20])
    for step in (30, 40, 50):
        shutil.copytree(generation_path(tmp_path / "run", 20), generation_path(tmp_path / "run", step))
        flip(generation_path(tmp_path / "run", step) / "__0_0.distcp")
    again, _ = opened(tmp_path / "run", keep=2)
    assert loaded(again) == (20, 20.0)
    save_all(again, [60])
    assert loaded(opened(tmp_path / "run")[0]) == (60, 60.0)
    assert 20 in again.steps()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_torchs_is_one_of_them(tmp_path):
    directory, lines = opened(tmp_path / "run")
    save_all(directory, [1])
    for step in (2, 3):
        dcp.save(state(step), checkpoint_id=generation_path(tmp_path / "run", step))
    assert loaded(directory) == (3, 3.0)
    data = generation_path(tmp_path / "run", 3) / "__0_0.distcp"
    data.write_bytes(data.read_bytes().replace(torch.full((12,), 3.0).numpy().tobytes(), b"\1" * 48))
    assert loaded(directory) == (2, 2.0)
    assert "Bad CRC-32" in lines[0]
    save_all(opened(tmp_path / "run")[0], [0])
    assert loaded(opened(tmp_path / "run")[0]) == (0, 0.0)


def test_what_a_killed_save_has_left_is_removed_by_the_next(tmp_path):
    directory, _ = opened(tmp_path / "run")
    save_all(directory, [1])
    left = [".step-00000002.saving", ".step-00000003.removing"]
    for name in left:
        (tmp_path / "run" / name).mkdir()
        (tmp_path / "run" / name / "__0_0.distcp").write_text("x")
    (tmp_path / "run" / "notes").write_text("mine")
    os.rename(generation_path(tmp_path / "run", 1), tmp_path / "run" / ".step-00000001.previous")
    again, _ = opened(tmp_path / "run")
    save_all(again, [4])
    assert sorted(os.listdir(tmp_path / "run")) == ["notes", "step-00000001", "step-00000004"]
    assert list_steps(tmp_path / "none") == []
    (tmp_path / "run" / ".step-00000004.previous").mkdir()
    remove_garbage(tmp_path / "run")
    assert sorted(os.listdir(tmp_path / "run")) == ["notes", "step-00000001", "step-00000004"]


# -- beside the training -----------------------------------------------------------------------------


def test_the_call_returns_before_it_is_written_and_polls_end_it(tmp_path, monkeypatch):
    directory, _ = opened(tmp_path / "run")
    save_all(directory, [1])
    free = []
    write = background.write_pieces

    def slow(*args):
        while not free:
            time.sleep(0.01)
        return write(*args)

    monkeypatch.setattr(background, "write_pieces", slow)
    directory.save(state(2), 2)
    for _ in range(5):
        directory.poll()
    assert directory.steps() == [1], "visible only when whole"
    free.append(True)
    polls = 0
    while directory.steps() == [1] and polls < 1000:
        directory.poll()
        polls += 1
        time.sleep(0.01)
    assert directory.steps() == [1, 2]
    assert loaded(directory) == (2, 2.0)


def test_at_most_one_is_under_way(tmp_path, monkeypatch):
    directory, _ = opened(tmp_path / "run", keep=10)
    running, most = [0], [0]
    write = background.write_pieces

    def counted(*args):
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.02)
        try:
            return write(*args)
        finally:
            running[0] -= 1

    monkeypatch.setattr(background, "write_pieces", counted)
    save_all(directory, range(6))
    assert most[0] == 1
    assert directory.steps() == list(range(6))


# -- any order of events -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_the_newest_whole_one_is_found(tmp_path, monkeypatch, seed):
    """Saves, polls, failures, damage and restarts in any order against a model of what must be there."""
    rng, good = random.Random(seed), background.write_pieces
    root = tmp_path / "run"
    directory, _ = opened(root, keep=2, max_failures=100)
    visible: dict[int, bool] = {}  # step -> whether it is whole
    known_damaged: set[int] = set()
    step = 0
    for _ in range(40):
        event = rng.choice(["save", "save", "save", "fail", "damage", "restart", "poll"])
        if event in ("save", "fail"):
            step += 1
            monkeypatch.setattr(
                background, "write_pieces", good if event == "save" else failing(errno.ENOSPC)
            )
            directory.save(state(step), step)
            with contextlib.suppress(CheckpointError):
                directory.flush()
            if event == "save":
                visible[step] = True
                for old in sorted(set(visible) - known_damaged)[:-2]:
                    del visible[old]
        elif event == "damage" and visible:
            victim = rng.choice(sorted(visible))
            flip(generation_path(root, victim) / "__0_0.distcp")
            visible[victim] = not visible[victim]  # the same bit: a second flip makes it whole again
        elif event == "restart":
            directory, _ = opened(root, keep=2, max_failures=100)
            newest = max((s for s in visible if visible[s]), default=None)
            known_damaged = {s for s in visible if newest is None or s > newest}
            if newest is not None:
                assert loaded(directory) == (newest, float(newest))
            elif visible:
                with pytest.raises(CheckpointError, match="is whole"):
                    directory.load_latest(state(0))
        else:
            directory.poll()
        assert directory.steps() == sorted(visible)


def test_one_generation_loads_with_plain_load(tmp_path):
    directory, _ = opened(tmp_path / "run")
    save_all(directory, [4])
    found = state(0)
    load(found, directory.step_path(4))
    assert found["w"].sum() == 48
    assert isinstance(directory.step_path(4), Path)
    with pytest.raises(
        CheckpointError, match=r"it has no file .metadata; it has that of step 4: use Directory\('.*run"
    ):
        load(found, tmp_path / "run")


def test_a_directory_may_be_opened_before_there_are_ranks(tmp_path, monkeypatch):
    directory, _ = opened(tmp_path / "run")
    made = []
    monkeypatch.setattr(directory_module, "World", lambda: made.append(1) or World())
    assert directory.steps() == [] and directory.latest() is None
    assert made == []
    save_all(directory, [1, 2])
    assert made == [1]
