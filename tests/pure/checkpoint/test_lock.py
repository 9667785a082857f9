"""One run at a time in a directory: the system's lock, a heartbeat where there is none, and taking over."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from longmesh.checkpoint import DirectoryLock, lock as module
from longmesh.errors import CheckpointError

HOLD = """
import sys, time
from longmesh.checkpoint import DirectoryLock
lock = DirectoryLock(sys.argv[1])
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def test_the_second_run_is_refused_while_the_first_lives(tmp_path, holder):
    text = (
        rf"out is in use by process {holder.pid} on {socket.gethostname()} since 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d; end "
        r"that run, give another directory, or use --force \(force=True\) if you know that it has ended"
    )
    with pytest.raises(CheckpointError, match=text):
        DirectoryLock(tmp_path / "out")
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    lock = DirectoryLock(tmp_path / "out")
    with pytest.raises(CheckpointError, match=rf"in use by process {os.getpid()} on"):
        DirectoryLock(tmp_path / "out")
    lock.release()
    lock.release()
    DirectoryLock(tmp_path / "out").release()
    assert (tmp_path / "out" / ".longmesh.lock").read_bytes() == b""


def test_force_takes_it_all_the_same(tmp_path, holder):
    lock = DirectoryLock(tmp_path / "out", force=True)
    assert json.loads((tmp_path / "out" / ".longmesh.lock").read_text())["pid"] == os.getpid()
    lock.release()


def no_locks(code):
    def flock(file, operation):
        raise OSError(code, os.strerror(code))

    return flock


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_without_locks_a_heartbeat_tells(tmp_path, monkeypatch, code):
    monkeypatch.setattr(module, "_BEAT_SECONDS", 0.02)
    path = tmp_path / "out" / ".longmesh.lock"
    first = DirectoryLock(tmp_path / "out", flock=no_locks(code))
    seen = json.loads(path.read_text())["seen"]
    deadline = time.monotonic() + 10
    while json.loads(path.read_text())["seen"] == seen:
        assert time.monotonic() < deadline, "no heartbeat"
        time.sleep(0.01)
    with pytest.raises(
        CheckpointError, match=r"it was seen 0 s ago, and can be taken over after 120 s; end that run"
    ):
        DirectoryLock(tmp_path / "out", flock=no_locks(code))
    DirectoryLock(tmp_path / "out", flock=no_locks(code), force=True).release()
    first.release()
    DirectoryLock(tmp_path / "out", flock=no_locks(code)).release()


@pytest.mark.parametrize(("age", "taken"), [(119, False), (121, True)])
def test_a_run_that_was_not_seen_for_two_minutes_is_taken_over(tmp_path, age, taken):
    out = tmp_path / "out"
    out.mkdir()
    holder = {"host": "far", "pid": 7, "since": time.time() - 900, "seen": time.time() - age}
    (out / ".longmesh.lock").write_text(json.dumps(holder))
    if taken:
        DirectoryLock(out, flock=no_locks(errno.ENOLCK)).release()
    else:
        with pytest.raises(
            CheckpointError, match=r"in use by process 7 on far since .*; it was seen 119 s ago"
        ):
            DirectoryLock(out, flock=no_locks(errno.ENOLCK))


def test_one_that_was_taken_from_us_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_BEAT_SECONDS", 0.01)
    lock = DirectoryLock(tmp_path / "out", flock=no_locks(errno.ENOLCK))
    other = json.dumps({"host": "far", "pid": 7, "since": 0, "seen": time.time()})
    (tmp_path / "out" / ".longmesh.lock").write_text(other)
    time.sleep(0.1)
    lock.release()
    assert (tmp_path / "out" / ".longmesh.lock").read_text() == other


def test_a_place_that_can_not_be_locked_is_told(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="file is a file; give the path of a directory"):
        DirectoryLock(tmp_path / "file")
    with pytest.raises(
        CheckpointError, match=r"inner could not be written: Not a directory.* bytes are free there"
    ):
        DirectoryLock(tmp_path / "file" / "inner")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".longmesh.lock").write_text("nonsense")
    DirectoryLock(tmp_path / "out").release()
    with pytest.raises(OSError, match="Input/output"):
        DirectoryLock(tmp_path / "out", flock=no_locks(errno.EIO))
