"""Replacing a checkpoint in one step, also where two renames have to do, and after a cut between them."""

import pytest

from longmesh.checkpoint.disk import backup_path, readable_path, replace_with_staged, staging_path


def make(path, text):
    path.mkdir()
    (path / "data").write_text(text)


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_directory_takes_the_place_of_another(tmp_path, can_exchange):
    target = tmp_path / "run"
    for text in ("one", "two"):
        make(staging_path(target), text)
        replace_with_staged(target, can_exchange=can_exchange)
        assert (target / "data").read_text() == text
        assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]


def test_a_file_takes_the_place_of_another(tmp_path):
    target = tmp_path / "model.safetensors"
    for text in ("one", "two"):
        staging_path(target).write_text(text)
        replace_with_staged(target)
        assert target.read_text() == text
        assert sorted(p.name for p in tmp_path.iterdir()) == ["model.safetensors"]


def test_between_two_renames_the_previous_one_is_read(tmp_path):
    target = tmp_path / "run"
    make(target, "one")
    assert readable_path(target) == target
    target.rename(backup_path(target))
    assert (readable_path(target) / "data").read_text() == "one"
    assert readable_path(tmp_path / "other") == tmp_path / "other"
