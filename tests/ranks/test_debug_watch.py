"""watch on real ranks: the rank that keeps others waiting is named, and nobody waits for it any longer."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from longmesh import Shard, distribute_tensor
from longmesh.errors import LongmeshError
from longmesh.testing import RankError, cpu_mesh
from longmesh.watch import watch

LIMIT_S = 1.5


def spin() -> None:
    while True:
        pass


def meet(how: str, said: str) -> None:
    """Rank 1 does not come to a collective; what the ranks say goes into a file."""
    os.dup2(os.open(said, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    x = distribute_tensor(torch.arange(5.0), cpu_mesh(3), [Shard(0)])
    total = x.sum()
    with watch(LIMIT_S):
        x.full_tensor()
        time.sleep(0.5)  # some beats, to post it
        if dist.get_rank() == 1:
            if how == "loops":
                spin()
            elif how == "stops":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif how == "goes another way":
                x.sin().full_tensor()
        total.item()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("loops", ["is in no collective (File ", "in spin)", "its last collective was all_to_all of"]),
        ("stops", ["is stopped (SIGSTOP, or Ctrl-Z); rank", "its last collective was all_to_all of"]),
        ("goes another way", ["rank 1 came to another collective than others: all_to_all of"]),
    ],
)
def test_the_rank_that_keeps_others_waiting_is_named(pool, tmp_path, how, said):
    started = time.monotonic()
    with pytest.raises(RankError, match="ended its process with exit code 124"):
        pool.run(meet, how, str(tmp_path / "said"), ranks=3, timeout=60)
    err = (tmp_path / "said").read_text()
    last = next(line for line in reversed(err.splitlines()) if line.startswith("longmesh: "))
    assert last.startswith("longmesh: rank 1 ")
    assert "all_reduce of () float32 at" in last
    assert all(part in err for part in said), err
    assert time.monotonic() - started < 30  # a limit for a hang, not a measurement


def stop_the_host(said: str, is_watched: bool) -> None:
    """Rank 0 is stopped, before rank 1 watches or after."""
    os.dup2(os.open(said, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    x = distribute_tensor(torch.arange(5.0), cpu_mesh(2), [Shard(0)])
    watched, rank = Path(said).with_name("watched"), dist.get_rank()
    if not is_watched:
        if rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1.0)
    with watch(LIMIT_S):
        if rank == 1:
            watched.touch()
        else:
            while not watched.exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGSTOP)
        x.full_tensor()


@pytest.mark.parametrize("is_watched", [True, False])
def test_the_rank_that_hosts_the_store_is_stopped(pool, tmp_path, is_watched):
    with pytest.raises(RankError, match="ended its process with exit code 124"):
        pool.run(stop_the_host, str(tmp_path / "said"), is_watched, ranks=2, timeout=60)
    said = (tmp_path / "said").read_text().splitlines()[-1]
    assert said.startswith(
        "longmesh: rank 0, or the launcher: whoever hosts the world's store is stopped or gone (no answer within 3 s); "
        "rank 1 waits in all_to_all of"
    )


def wait_in_a_section(seconds: float) -> float:
    x = distribute_tensor(torch.arange(5.0), cpu_mesh(2), [Shard(0)])
    with watch(0.6) as watching:
        if dist.get_rank() == 0:
            with watching.section("prepare", timeout=60):
                time.sleep(seconds)
        return x.sum().item()


def test_a_section_is_waited_for(pool):
    assert pool.run(wait_in_a_section, 3.0, ranks=2) == [10.0, 10.0]


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf")])
def test_a_limit_is_a_positive_number(timeout):
    with pytest.raises(LongmeshError, match=r"watch\(timeout=.*\): give a positive number of seconds"):
        watch(timeout).__enter__()


def test_no_process_group_is_told():
    with pytest.raises(RuntimeError, match=r"watch\(\) needs a process group: start this script"):
        watch(5).__enter__()
