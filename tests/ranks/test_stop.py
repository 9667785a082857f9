"""stop_requested: a signal to one rank is known to all at the same point."""

import os
import signal
import subprocess
import sys

import pytest
import torch.distributed as dist

from longmesh import REQUEUE_EXIT_CODE, stop_requested
from longmesh.testing import RankError


def ask(signum: int, asked: int) -> tuple[bool, bool]:
    before = stop_requested()
    if dist.get_rank() == asked:
        os.kill(os.getpid(), signum)
    return before, stop_requested()


# Ranks of a pool ignore SIGINT, which is for the pool's owner: tests/e2e/test_faults.py sends it.
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1], ids=lambda s: s.name)
def test_one_rank_is_asked_and_all_know(pool, signum):
    with pytest.raises(RankError, match="left alone"):
        pool.run(ask_and_leave, signum, ranks=3)


def ask_and_leave(signum: int) -> None:
    """The rank keeps what it noted, so it must not be used again."""
    assert ask(signum, asked=1) == (False, True)
    raise RuntimeError("left alone")


ALONE = """
import os, signal, sys, time
from longmesh import stop_requested
assert not stop_requested()
os.kill(os.getpid(), signal.SIGINT)
assert stop_requested()
os.kill(os.getpid(), signal.SIGINT)
time.sleep(60)
"""


def test_a_second_interrupt_ends_a_process_at_once():
    done = subprocess.run([sys.executable, "-c", ALONE], timeout=120, check=False, capture_output=True)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, b"")
    assert REQUEUE_EXIT_CODE == 75
