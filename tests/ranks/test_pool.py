"""What a run on the pool is: its world, what travels there and back, what is refused."""

import os
import random
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
from support.processes import is_alive


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


def test_pools_may_be_closed_in_any_order() -> None:
    first, second = RankPool(1), RankPool(1)
    assert [pool.run(dist.get_rank, ranks=1) for pool in (first, second)] == [[0], [0]]
    first.close()  # the second one's processes have copies of its descriptors
    assert second.run(dist.get_rank, ranks=1) == [0]
    second.close()


def test_output_of_ranks_passes_through(capfd: pytest.CaptureFixture[str]) -> None:
    with RankPool(2) as own:
        own.run(speak)
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["out of rank 0", "out of rank 1"]
    assert sorted(err.splitlines()) == ["err of rank 0", "err of rank 1"]


@pytest.mark.skipif(sys.platform != "linux", reason="process names are read from /proc")
def test_ranks_have_names(pool: RankPool) -> None:
    assert pool.run(read_process_name, ranks=2) == ["lm-rank0of2", "lm-rank1of2"]


def test_small_runs_are_cheap(pool: RankPool) -> None:
    pool.run(echo, 0)
    start = time.monotonic()
    for n in range(100):
        assert pool.run(echo, n) == [n] * 4
    assert time.monotonic() - start < 5.0  # 0.05 s when nothing else runs
