"""The pool itself: what a call returns, what a failure says, and that the next call is always clean."""

import os
import random
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from longmesh.errors import LongmeshError
from longmesh.testing import RankError, RankPool, cpu_mesh


@dataclass
class Pair:
    first: int
    second: str


def describe_rank() -> tuple[int, int, int, int]:
    return dist.get_rank(), dist.get_world_size(), os.getpid(), torch.get_num_threads()


def sum_ranks(start: float, *, scale: float = 1.0) -> torch.Tensor:
    x = torch.full((3,), start + scale * dist.get_rank())
    dist.all_reduce(x)
    return x


def echo(value: object) -> object:
    return value


def draw() -> tuple[list[float], float]:
    return torch.rand(3).tolist(), random.random()


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


def assert_sum() -> None:
    numbers = [1, 2]
    assert sum(numbers) == 4


def warn() -> None:
    warnings.warn("an old name", DeprecationWarning, stacklevel=2)


def describe_mesh() -> tuple[tuple[int, ...] | None, tuple[int, ...] | None, bool]:
    mesh = cpu_mesh(2, 2, names=("dp", "tp"))
    line = init_device_mesh("cpu", (4,))
    return mesh.get_coordinate(), line.get_coordinate(), mesh is cpu_mesh(2, 2, names=("dp", "tp"))


def read_process_name() -> str:
    return Path("/proc/self/comm").read_text().strip()


def speak() -> None:
    print(f"out of rank {dist.get_rank()}")
    print(f"err of rank {dist.get_rank()}", file=sys.stderr)


def pids_of(pool: RankPool, ranks: int) -> list[int]:
    return [pid for _, _, pid, _ in pool.run(describe_rank, ranks=ranks)]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("ranks", [4, 1, 3, 2])
def test_a_run_is_a_world_of_exactly_its_ranks(pool: RankPool, ranks: int) -> None:
    seen = pool.run(describe_rank, ranks=ranks)
    assert [(rank, size, threads) for rank, size, _, threads in seen] == [(r, ranks, 1) for r in range(ranks)]
    assert len({pid for _, _, pid, _ in seen} | {os.getpid()}) == ranks + 1


def test_all_ranks_of_the_pool_run_by_default(pool: RankPool) -> None:
    assert pool.run(dist.get_rank) == [0, 1, 2, 3]


def test_arguments_and_keywords_reach_collectives(pool: RankPool) -> None:
    for result in pool.run(sum_ranks, 1.0, scale=2.0, ranks=3):
        assert result.tolist() == [9.0, 9.0, 9.0]


def test_processes_live_across_runs_and_sizes(pool: RankPool) -> None:
    two, four = pids_of(pool, 2), pids_of(pool, 4)
    assert pids_of(pool, 2) == two
    assert pids_of(pool, 4) == four
    assert not set(two) & set(four)


def test_meshes_work_and_cpu_mesh_keeps_them(pool: RankPool) -> None:
    seen = pool.run(describe_mesh)
    assert [(a, b) for a, b, _ in seen] == [
        ((0, 0), (0,)),
        ((0, 1), (1,)),
        ((1, 0), (2,)),
        ((1, 1), (3,)),
    ]
    assert all(same for _, _, same in seen)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.tensor(7),
        torch.empty(0, 3),
        torch.tensor([True, False]),
        torch.tensor([1.5, -2.5], dtype=torch.bfloat16),
        torch.tensor([1 + 2j]),
        torch.tensor([1 + 2j]).conj(),
        torch.arange(6.0).reshape(2, 3).t(),
        torch.arange(8.0)[2:5],
        torch.tensor([1.0, 2.0], requires_grad=True),
        torch.arange(1 << 20, dtype=torch.int64),
    ],
    ids=str,
)
def test_tensors_travel_both_ways_as_plain_values(pool: RankPool, tensor: torch.Tensor) -> None:
    for back in pool.run(echo, tensor, ranks=2):
        assert isinstance(back, torch.Tensor)
        torch.testing.assert_close(back, tensor, rtol=0, atol=0, check_stride=True)
        assert back.requires_grad == tensor.requires_grad


def test_classes_of_a_test_module_travel(pool: RankPool) -> None:
    assert pool.run(echo, [Pair(1, "a"), torch.nn.Parameter(torch.ones(1))], ranks=1)[0] == [
        Pair(1, "a"),
        torch.nn.Parameter(torch.ones(1)),
    ]


def test_every_run_starts_from_the_same_seed(pool: RankPool) -> None:
    first = pool.run(draw, ranks=2)
    assert first[0] == first[1]
    assert pool.run(draw, ranks=2) == first


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


def test_asserts_on_ranks_are_explained_as_in_any_test(pool: RankPool) -> None:
    with pytest.raises(RankError, match=r"assert 3 == 4\n .*where 3 = sum\(\[1, 2\]\)"):
        pool.run(assert_sum, ranks=1)


def test_warnings_on_ranks_are_treated_as_here(pool: RankPool) -> None:
    with pytest.raises(RankError, match="raised DeprecationWarning: an old name"):
        pool.run(warn, ranks=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert pool.run(warn, ranks=1) == [None]


def test_a_lambda_is_refused_with_the_way_out(pool: RankPool) -> None:
    with pytest.raises(LongmeshError) as caught:
        pool.run(lambda: 0)
    assert str(caught.value) == (
        f"cannot send {__name__}.test_a_lambda_is_refused_with_the_way_out.<locals>.<lambda> to the ranks: "
        "a lambda or nested function has no importable name; "
        "define it at the top level of a module and pass what it needs as arguments"
    )


def test_an_argument_that_cannot_be_sent_is_refused_with_the_way_out(pool: RankPool) -> None:
    with pytest.raises(LongmeshError) as caught:
        pool.run(echo, (n for n in range(3)))
    assert str(caught.value) == (
        f"cannot send {__name__}.echo and its arguments to the ranks: cannot pickle 'generator' object; "
        "pass values that pickle can copy, and make the rest inside the function"
    )


def test_wrong_numbers_are_refused(pool: RankPool) -> None:
    with pytest.raises(LongmeshError, match=r"^RankPool\(max_ranks=0\): a pool has at least 1 rank$"):
        RankPool(0)
    with pytest.raises(LongmeshError, match=r"^run\(ranks=0\): a run has at least 1 rank$"):
        pool.run(dist.get_rank, ranks=0)
    with pytest.raises(
        LongmeshError, match=r"^run\(ranks=5\): this pool has 1 to 4 ranks; make it with RankPool\(5\)$"
    ):
        pool.run(dist.get_rank, ranks=5)
    with pytest.raises(LongmeshError, match=r"^run\(timeout=0\): give a positive number of seconds$"):
        pool.run(dist.get_rank, timeout=0)


def test_a_closed_pool_has_no_ranks() -> None:
    with RankPool(2) as own:
        pids = pids_of(own, 2)
    assert not any(is_alive(pid) for pid in pids)
    own.close()
    with pytest.raises(LongmeshError, match=r"^run\(\) on a closed RankPool: make a new one$"):
        own.run(dist.get_rank)


def test_output_of_ranks_passes_through(capfd: pytest.CaptureFixture[str]) -> None:
    with RankPool(2) as own:
        own.run(speak)
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["out of rank 0", "out of rank 1"]
    assert sorted(err.splitlines()) == ["err of rank 0", "err of rank 1"]


@pytest.mark.skipif(sys.platform != "linux", reason="process names are read from /proc")
def test_ranks_have_names(pool: RankPool) -> None:
    assert pool.run(read_process_name, ranks=2) == ["lm-rank0of2", "lm-rank1of2"]


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
    deadline = time.monotonic() + 10
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(is_alive(pid) for pid in pids)


def test_small_runs_are_cheap(pool: RankPool) -> None:
    pool.run(echo, 0)
    start = time.monotonic()
    for n in range(100):
        assert pool.run(echo, n) == [n] * 4
    assert time.monotonic() - start < 5.0  # 0.05 s when nothing else runs
