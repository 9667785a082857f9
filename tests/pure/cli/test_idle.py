"""The launcher's own clock: ranks that are stopped, and ranks that do not come to their program."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from longmesh.cli import idle
from longmesh.cli.idle import IdleRanks, WaitLimits, is_stopped
from longmesh.watch.thread import FileBoard
from longmesh.watch.thread.status import RankStatus

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="states are read from /proc")


class Clock:
    """Time that passes when it is told to."""

    def __init__(self, monkeypatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(idle.time, "monotonic", lambda: self.now)

    def pass_by(self, ranks: IdleRanks, pids: dict[int, int], seconds: float):
        """The first finding of some seconds of looking, and when it came."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.25
            finding = ranks.look(pids)
            if finding is not None:
                return finding, self.now
        return None, self.now


@pytest.fixture
def board(tmp_path: Path) -> FileBoard:
    board = FileBoard(str(tmp_path))
    waiting = RankStatus(0, 5, "here", os.getpid(), waits_in="all_reduce at s.py:3", seconds=2.0)
    board.write("rank0", waiting.to_json())
    board.write("rank1", RankStatus(1, 1, "here", 77, last="all_gather at s.py:2").to_json())
    return board


@pytest.fixture
def stopped():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        process.send_signal(signal.SIGSTOP)
        while not is_stopped(process.pid):
            time.sleep(0.01)
        yield process
        process.kill()


def test_a_stopped_rank_is_named_at_its_limit(board, stopped, monkeypatch):
    clock = Clock(monkeypatch)
    ranks = IdleRanks(board, 2, WaitLimits(9.0, 9.0, 3.0))
    finding, at = clock.pass_by(ranks, {0: os.getpid(), 1: stopped.pid}, 10)
    assert finding is not None and at == 3.0
    assert finding.describe() == (
        "  rank 0 waits in all_reduce at s.py:3, for 2 s\n"
        "  rank 1: its last collective was all_gather at s.py:2\n"
        "longmesh: rank 1 (host here, pid 77) is stopped (SIGSTOP, or Ctrl-Z), for 3 s, and rank 0 waits in "
        "all_reduce at s.py:3"
    )


def test_one_that_goes_on_in_time_is_not(board, stopped, monkeypatch):
    clock = Clock(monkeypatch)
    ranks, pids = IdleRanks(board, 2, WaitLimits(9.0, 9.0, 3.0)), {0: os.getpid(), 1: stopped.pid}
    assert clock.pass_by(ranks, pids, 2.5)[0] is None
    stopped.send_signal(signal.SIGCONT)
    while is_stopped(stopped.pid):
        time.sleep(0.01)
    assert clock.pass_by(ranks, pids, 20)[0] is None


def test_time_in_which_the_launcher_was_stopped_does_not_count(board, stopped, monkeypatch):
    clock = Clock(monkeypatch)
    ranks = IdleRanks(board, 2, WaitLimits(9.0, 9.0, 3.0))
    clock.now += 100
    assert ranks.look({1: stopped.pid}) is None
    assert clock.pass_by(ranks, {1: stopped.pid}, 10)[1] == 102.0


def test_without_a_limit_it_is_only_told_once(board, stopped, monkeypatch, capsys):
    clock = Clock(monkeypatch)
    ranks = IdleRanks(board, 2, WaitLimits(4.0))
    assert clock.pass_by(ranks, {1: stopped.pid}, 30)[0] is None
    assert capsys.readouterr().err.count("is stopped (SIGSTOP, or Ctrl-Z), for 4 s") == 1


def test_a_rank_that_does_not_come_to_its_program(board, monkeypatch):
    clock = Clock(monkeypatch)
    board.write("rank1", RankStatus(1, 0, "here", 77).to_json())
    ranks, pids = IdleRanks(board, 2, WaitLimits(9.0, 9.0, 3.0)), dict.fromkeys((0, 1), os.getpid())
    finding, at = clock.pass_by(ranks, pids, 20)
    assert finding is not None and at == 9.0
    assert finding.headline == (
        "rank 1 (host here, pid 77) has not come to its program: Python is still starting, for 9 s, and rank 0 waits "
        "in all_reduce at s.py:3"
    )
    board.write("rank1", RankStatus(1, 1, "here", 77).to_json())
    assert clock.pass_by(IdleRanks(board, 2, WaitLimits(9.0, 9.0, 3.0)), pids, 20)[0] is None
