"""What the pool says when a rank fails, hangs or dies, and that the next run is always clean."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from longmesh.errors import LongmeshError
from longmesh.testing import RankError, RankPool
from support.processes import is_alive, wait_until_gone


def describe_rank() -> tuple[int, int, int, int]:
    return dist.get_rank(), dist.get_world_size(), os.getpid(), torch.get_num_threads()


def sum_ranks(start: float, *, scale: float = 1.0) -> torch.Tensor:
    x = torch.full((3,), start + scale * dist.get_rank())
    dist.all_reduce(x)
    return x


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} has a problem")
    dist.barrier()


def fail_everywhere_after_a_collective() -> None:
    dist.barrier()
    raise LongmeshError("no such layout")


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)
    dist.barrier()


def leave_out_rank_0() -> None:
    if dist.get_rank() != 0:
        dist.barrier()


def kill_on(rank: int, signum: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signum)
    dist.barrier()


def exit_on(rank: int, code: int) -> None:
    if dist.get_rank() == rank:
        os._exit(code)
    dist.barrier()


def return_unpicklable() -> object:
    return lambda: 0


def pids_of(pool: RankPool, ranks: int) -> list[int]:
    return [pid for _, _, pid, _ in pool.run(describe_rank, ranks=ranks)]


def test_the_rank_that_failed_first_is_named_with_its_traceback(pool: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(fail_on, 2)
    error = caught.value
    lines = str(error).splitlines()
    assert lines[0] == "rank 2 of 4 raised ValueError: rank 2 has a problem"
    assert lines[1] == f"  in {__name__}.fail_on"
    assert "Connection closed by peer" in lines[2]
    assert lines[2].startswith("  then rank 0 raised RuntimeError: ")
    assert lines[5:7] == ["", "Traceback (most recent call last):"]
    assert 'raise ValueError(f"rank {rank} has a problem")' in str(error)
    assert lines[-1] == "ValueError: rank 2 has a problem"
    assert error.rank == 2
    assert error.traceback.startswith("Traceback (most recent call last):")
    assert "worker.py" not in error.traceback


def test_an_error_on_all_ranks_is_told_once(pool: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(fail_everywhere_after_a_collective, ranks=3)
    assert str(caught.value).startswith(
        "rank 0 of 3 raised longmesh.errors.LongmeshError: no such layout\n"
        f"  in {__name__}.fail_everywhere_after_a_collective\n"
        "  likewise on rank 1, 2\n"
        "\n"
        "Traceback (most recent call last):\n"
    )
    assert sorted(caught.value.failures) == [0, 1, 2]


def test_after_a_failure_the_next_run_has_fresh_ranks(pool: RankPool) -> None:
    before = pids_of(pool, 2)
    with pytest.raises(RankError):
        pool.run(fail_on, 0, ranks=2)
    assert not any(is_alive(pid) for pid in before)
    after = pids_of(pool, 2)
    assert not set(before) & set(after)
    assert pool.run(sum_ranks, 0.0, ranks=2)[1].tolist() == [1.0, 1.0, 1.0]


def test_a_rank_that_hangs_is_named_shown_and_ended(pool: RankPool) -> None:
    before = pids_of(pool, 3)
    with pytest.raises(RankError) as caught:
        pool.run(hang_on, 1, ranks=3, timeout=1.0)
    text = str(caught.value)
    assert text.startswith(
        "rank 1 of 3 did not finish within 1 s and was ended\n"
        f"  in {__name__}.hang_on\n"
        "  then rank 0 was waiting for it in a collective\n"
        "  then rank 2 was waiting for it in a collective\n"
    )
    assert "in hang_on" in caught.value.traceback
    assert "\nrank 2:\n" in text
    assert "in barrier" in text
    assert not any(is_alive(pid) for pid in before)
    assert pool.run(dist.get_rank, ranks=3) == [0, 1, 2]


def test_ranks_that_wait_for_one_that_returned_are_all_named(pool: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(leave_out_rank_0, ranks=3, timeout=1.0)
    assert str(caught.value).startswith(
        "rank 1 of 3 did not finish within 1 s and was ended\n"
        f"  in {__name__}.leave_out_rank_0\n"
        "  likewise on rank 2\n"
    )
    assert sorted(caught.value.failures) == [1, 2]


def test_a_rank_killed_by_a_signal_is_the_cause(pool: RankPool) -> None:
    with pytest.raises(RankError, match=r"^rank 1 of 2 was killed by SIGKILL\n") as caught:
        pool.run(kill_on, 1, signal.SIGKILL, ranks=2)
    assert caught.value.failures[1].kind == "died"
    assert pool.run(dist.get_rank, ranks=2) == [0, 1]


def test_a_rank_that_leaves_is_the_cause(pool: RankPool) -> None:
    with pytest.raises(RankError, match=r"^rank 0 of 2 ended its process with exit code 3\n"):
        pool.run(exit_on, 0, 3, ranks=2)


def test_system_exit_is_a_failure(pool: RankPool) -> None:
    with pytest.raises(RankError, match=r"^rank 0 of 2 raised SystemExit: 5\n"):
        pool.run(sys.exit, 5, ranks=2)


def test_a_result_that_cannot_be_sent_is_an_error(pool: RankPool) -> None:
    with pytest.raises(
        RankError, match=r"^rank 0 of 1 returned a function that cannot be sent back: .*; return plain values"
    ):
        pool.run(return_unpicklable, ranks=1)


def test_a_pool_without_its_nursery_says_so() -> None:
    with RankPool(1) as own:
        (rank,), (nursery,) = pids_of(own, 1), own.run(os.getppid)
        os.kill(nursery, signal.SIGKILL)
        assert wait_until_gone([rank])
        for _ in range(2):
            with pytest.raises(RuntimeError, match="forks this pool's ranks is gone: make a new RankPool"):
                own.run(describe_rank)


def test_an_interrupted_run_leaves_no_rank_behind(pool: RankPool) -> None:
    before = pids_of(pool, 2)

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            pool.run(hang_on, 0, ranks=2)
    finally:
        signal.signal(signal.SIGALRM, former)
    assert not any(is_alive(pid) for pid in before)
    assert pool.run(dist.get_rank, ranks=2) == [0, 1]


OWNER_THAT_DIES = """
import os, signal, time
import torch.distributed as dist
from longmesh.testing import RankPool

def show_and_wait():
    print(os.getpid(), flush=True)
    dist.barrier()
    if dist.get_rank() == 0:
        os.kill(int(os.environ["OWNER"]), signal.SIGKILL)
    time.sleep(600)

if __name__ == "__main__":
    os.environ["OWNER"] = str(os.getpid())
    RankPool(2).run(show_and_wait)
"""


def test_ranks_die_with_their_owner(tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(OWNER_THAT_DIES)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    pids = [int(line) for line in done.stdout.split()]
    assert len(pids) == 2
    assert wait_until_gone(pids)
