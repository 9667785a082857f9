"""Saves that fail: full, read-only and vanished disks, and states that are not finite."""

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch

from longmesh.checkpoint import background, directory as directory_module
from longmesh.checkpoint.generations import generation_path
from longmesh.errors import CheckpointError, LongmeshError
from support.generations import failing, loaded, opened, save_all, state


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_a_failed_save_is_told_and_the_run_goes_on(tmp_path, monkeypatch, code):
    directory, lines = opened(tmp_path / "run")
    save_all(directory, [1])
    good = background.write_pieces
    monkeypatch.setattr(background, "write_pieces", failing(code, "__0_0.distcp"))
    directory.save(state(2), 2)
    while not lines:
        directory.poll()
    target = generation_path(tmp_path / "run", 2)
    free = shutil.disk_usage(tmp_path).free
    (line,) = lines
    start, _, rest = line.partition(" bytes are needed and ")
    assert start == f"{target} could not be written: {os.strerror(code)}: __0_0.distcp; 56"
    number, _, end = rest.partition(" are free there; ")
    assert abs(int(number.replace(",", "")) - free) < 1 << 30
    assert end == "the newest checkpoint is that of step 1, and the run continues"
    assert os.listdir(tmp_path / "run") == ["step-00000001"], "nothing is left of it"
    monkeypatch.setattr(background, "write_pieces", good)
    save_all(directory, [3])
    assert loaded(directory) == (3, 3.0)


def test_after_some_failures_in_a_row_the_run_stops(tmp_path, monkeypatch):
    directory, lines = opened(tmp_path / "run", max_failures=3)
    good = background.write_pieces
    for step in range(4):  # a success between starts the count anew
        monkeypatch.setattr(background, "write_pieces", good if step == 2 else failing(errno.ENOSPC))
        directory.save(state(step), step)
    with contextlib.suppress(CheckpointError):
        directory.flush()
    assert len(lines) == 3
    assert lines[0].endswith("; there is no checkpoint yet, and the run continues")
    directory.save(state(5), 5)
    with pytest.raises(
        CheckpointError, match=r"No space left .*\n3 saves in a row have failed; the newest .* step 2$"
    ):
        save_all(directory, [6, 7])
    directory, _ = opened(tmp_path / "other", max_failures=1)
    directory.save(state(1), 1)
    with pytest.raises(
        CheckpointError, match=r"No space left .*\nthe save has failed; there is no checkpoint yet"
    ):
        directory.flush()


def test_a_flush_raises_what_was_told(tmp_path, monkeypatch):
    directory, lines = opened(tmp_path / "run")
    monkeypatch.setattr(background, "write_pieces", failing(errno.ENOSPC))
    directory.save(state(1), 1)
    with pytest.raises(CheckpointError, match="No space left on device"):
        directory.flush()
    assert len(lines) == 1


def test_a_save_that_can_not_fit_is_not_begun(tmp_path, monkeypatch):
    directory, lines = opened(tmp_path / "run")
    save_all(directory, [1])
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10))
    directory.save(state(2), 2)
    (line,) = lines
    assert (
        "step-00000002 could not be written: 56 bytes are needed and 10 are free there; make room, or" in line
    )
    assert os.listdir(tmp_path / "run") == ["step-00000001"]


def test_a_directory_that_vanishes_is_told_and_not_made_again(tmp_path):
    """It may be a mount that is gone: the disk below it is not the place to write to."""
    directory, lines = opened(tmp_path / "run")
    save_all(directory, [1])
    shutil.rmtree(tmp_path / "run")
    directory.save(state(2), 2)
    assert "could not be written: No such file or directory: " in lines[0]
    assert lines[0].endswith("there is no checkpoint yet, and the run continues")
    assert not (tmp_path / "run").exists()


def test_a_path_that_is_a_file_is_told(tmp_path):
    (tmp_path / "run").write_text("x")
    with pytest.raises(LongmeshError, match="run is a file; give the path of a directory"):
        opened(tmp_path / "run")
    directory, _ = opened(tmp_path / "run" / "inner", max_failures=1)
    with pytest.raises(CheckpointError, match="inner/step-00000001 could not be written: Not a directory"):
        directory.save(state(1), 1)


def test_what_can_not_be_copied_is_a_failed_save(tmp_path):
    directory, lines = opened(tmp_path / "run")
    save_all(directory, [1])
    directory.save(state(2) | {"made": lambda: None}, 2)
    with pytest.raises(CheckpointError, match=r"step-00000002 could not be written: \w+Error: .*lambda"):
        directory.flush()
    assert len(lines) == 1
    assert os.listdir(tmp_path / "run") == ["step-00000001"]
    save_all(directory, [3])
    assert loaded(directory) == (3, 3.0)


def test_one_that_can_not_be_removed_is_told_and_the_save_counts(tmp_path, monkeypatch):
    directory, lines = opened(tmp_path / "run", keep=1)
    save_all(directory, [1])
    monkeypatch.setattr(directory_module, "remove_generation", failing(errno.EACCES))
    save_all(directory, [2])
    assert lines == [f"{generation_path(tmp_path / 'run', 1)} could not be removed: Permission denied"]
    assert directory.steps() == [1, 2]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_state_that_is_not_finite_is_not_saved(tmp_path, value):
    directory, lines = opened(tmp_path / "run", check_finite=True)
    save_all(directory, [1])
    bad = state(2)
    bad["nested"]["n"][1][1] = value
    directory.save(bad, 2)
    with pytest.raises(CheckpointError):
        directory.flush()
    text = "step-00000002 was not written: 'nested.n.1' is not finite, so the checkpoint would be useless"
    assert text in lines[0]
    assert loaded(directory) == (1, 1.0)
    plain, _ = opened(tmp_path / "other")
    plain.save(bad, 2)
    plain.flush()
    assert plain.steps() == [2], "masks hold infinities"


def test_every_element_type_is_looked_through():
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.complex64,
        torch.float8_e5m2,
    ):
        x = torch.zeros(70_000).to(dtype)
        assert background.is_finite(x)
        x[69_999] = float("nan")
        assert not background.is_finite(x), dtype
    assert background.is_finite(torch.ones(3, dtype=torch.int64))
    assert background.is_finite(torch.ones(0))


FULL_DISK = textwrap.dedent("""
    import os, shutil, sys, torch
    from longmesh.checkpoint import Directory, save, save_safetensors
    from longmesh.errors import CheckpointError, LongmeshError

    torch.set_num_threads(1)
    root = sys.argv[1]

    def state(value):
        return {"w": torch.full((100_000,), value), "o": "x" * 60_000}

    for kib in map(int, sys.argv[2:]):
        directory = Directory(root + "/run", keep=1, tell=lambda line: None)
        directory.save(state(1.0), 1)
        directory.flush()
        with open(root + "/filler", "wb") as filler:
            filler.write(b"x" * (os.statvfs(root).f_bavail * os.statvfs(root).f_frsize - kib * 1024))
        for write in (lambda: [directory.save(state(2.0), 2), directory.flush()],
                      lambda: save(state(2.0), root + "/one"),
                      lambda: save_safetensors({"w": state(2.0)["w"]}, root + "/m.safetensors")):
            try:
                write()
                print("no error")
            except CheckpointError as error:
                print(str(error).replace(root, "ROOT"))
        print(sorted(os.listdir(root)), os.listdir(root + "/run"))
        found = state(0.0)
        print(directory.load_latest(found), float(found["w"].sum()))
        for name in os.listdir(root):
            shutil.rmtree(root + "/" + name) if os.path.isdir(root + "/" + name) else os.remove(root + "/" + name)
""")


def test_a_disk_that_is_full(tmp_path):
    """A real one, of 2 MiB; free is less than the tensors, or enough for them and not for all."""
    enter = ["unshare", "--map-root-user", "--mount", "bash", "-c"]
    script = f'mount -t tmpfs -o size=2m none {tmp_path} && exec "$@"'
    try:
        tried = subprocess.run([*enter, f"mount -t tmpfs none {tmp_path}"], capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("no unshare to mount a small disk with")
    if tried.returncode:
        pytest.skip(f"no small disk can be mounted: {tried.stderr.decode().strip()}")
    rooms = [8, 300, 396, 410, 460, 470]
    command = [sys.executable, "-W", "error", "-c", FULL_DISK, str(tmp_path), *map(str, rooms)]
    done = subprocess.run(
        [*enter, script, "bash", *command], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for number, kib in enumerate(rooms):
        *errors, left, found = lines[5 * number : 5 * number + 5]
        for name, error in zip(("run/step-00000002", "one", "m.safetensors"), errors, strict=True):
            assert error == "no error" or error.startswith(f"ROOT/{name} could not be written: ")
            assert error == "no error" or (" bytes are needed and " in error and " are free there" in error)
            assert kib > 390 or error != "no error"
        assert ".saving" not in left
        assert found == ("2 200000.0" if errors[0] == "no error" else "1 100000.0")
