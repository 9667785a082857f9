"""Ranks that are called differently: every rank raises the same, and the ranks can go on afterwards."""

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from longmesh import DTensor, Partial, Replicate, Shard, distribute_tensor
from longmesh.comm.agree import agree_on_mesh
from longmesh.errors import LongmeshError
from longmesh.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from longmesh.testing import cpu_mesh

DISTRIBUTE = {
    "placements": lambda r: (torch.zeros(4, 2), [Shard(r)], {}),
    "shape": lambda r: (torch.zeros(4 + r), [Shard(0)], {}),
    "dims": lambda r: (torch.zeros((3,) * (1 + r)), [Shard(0)], {}),
    "dtype": lambda r: (torch.zeros(4, dtype=[torch.float32, torch.int32][r]), [Shard(0)], {}),
    "requires_grad": lambda r: (torch.zeros(4, requires_grad=bool(r)), [Shard(0)], {}),
    "source": lambda r: (torch.zeros(4), [Shard(0)], {"src_data_rank": r}),
    "one is wrong": lambda r: (torch.zeros(4), [Shard(5 * r)], {}),
    "one has no such rank": lambda r: (torch.zeros(4), [Shard(0)], {"src_data_rank": 9 * r}),
    "partial": lambda r: (torch.zeros(4), [Partial(["sum", "max"][r])], {}),
    "one is no tensor": lambda r: (["zeros", torch.zeros(4)][1 - r], [Shard(0)], {}),
    "one has no data": lambda r: (torch.zeros(4, device=["cpu", "meta"][r]), [Shard(0)], {}),
}
FROM_LOCAL = {
    "dtype": lambda r: (torch.zeros(3, dtype=[torch.float32, torch.float64][r]), [Shard(0)], {}),
    "requires_grad": lambda r: (torch.zeros(3, requires_grad=bool(r)), [Shard(0)], {}),
    "size of a partial": lambda r: (torch.zeros(6 - 2 * r), [Partial()], {}),
    "size of a replica": lambda r: (torch.zeros(6 - 2 * r), [Replicate()], {}),
    "size of a shard": lambda r: (torch.zeros(3 + r), [Shard(0)], {}),
    "sizes that don't fit the shape": lambda r: (torch.zeros(2), [Shard(0)], {"shape": (5,)}),
    "another dim": lambda r: (torch.zeros(3, 2 + r), [Shard(0)], {"shape": (6, 2)}),
    "dims": lambda r: (torch.zeros((3,) * (1 + r)), [Shard(0)], {}),
    "placements": lambda r: (torch.zeros(3), [[Shard(0), Replicate()][r]], {}),
    "shape": lambda r: (torch.zeros(3), [Shard(0)], {"shape": (6 + r,)}),
}


def raised_by(call, case):
    mesh = cpu_mesh(2)
    tensor, placements, options = case(dist.get_rank())
    with pytest.raises(LongmeshError) as raised:
        call(tensor, mesh, placements, **options)
    assert isinstance(raised.value, ValueError)
    whole = distribute_tensor(
        torch.arange(5.0), mesh, [Shard(0)]
    ).full_tensor()  # the ranks are still in step
    return str(raised.value), whole.tolist() == [0, 1, 2, 3, 4]


def distributed(name):
    return raised_by(distribute_tensor, DISTRIBUTE[name])


def checked(name):
    return raised_by(
        lambda *args, **options: DTensor.from_local(*args, run_check=True, **options), FROM_LOCAL[name]
    )


@pytest.mark.parametrize("name", DISTRIBUTE)
def test_distribute_tensor(pool, name):
    (first, first_goes_on), (second, second_goes_on) = pool.run(distributed, name, ranks=2)
    assert first_goes_on and second_goes_on
    assert first == second or "so every rank stops" in first
    assert "rank 1" in first


@pytest.mark.parametrize("name", FROM_LOCAL)
def test_from_local_with_a_check(pool, name):
    (first, first_goes_on), (second, second_goes_on) = pool.run(checked, name, ranks=2)
    assert first_goes_on and second_goes_on
    assert first == second
    assert first.startswith("from_local(run_check=True): ")


PLANS = {
    "another style": lambda r: {"0": [ColwiseParallel(), RowwiseParallel()][r]},
    "another module": lambda r: {str(r): ColwiseParallel()},
    "one matches nothing": lambda r: {["0", "x"][r]: ColwiseParallel()},
    "one is no plan": lambda r: {"0": [ColwiseParallel(), "colwise"][r]},
}


def parallelized(name):
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    told = raised_by(
        lambda plan, mesh, _: parallelize_module(model, mesh, plan), lambda r: (PLANS[name](r), None, {})
    )
    return *told, not any(isinstance(p, DTensor) for p in model.parameters())


@pytest.mark.parametrize("name", PLANS)
def test_parallelize_module(pool, name):
    (first, *others), (second, *of_second) = pool.run(parallelized, name, ranks=2)
    assert others == of_second == [True, True]
    assert "rank 1" in first and (first == second or "so every rank stops: " + second in first)


def test_texts(pool):
    assert pool.run(distributed, "placements", ranks=2)[0][0] == (
        "distribute_tensor: the ranks were called with different arguments: rank 0 with Arguments(shape=(4, 2), "
        "dtype='float32', layout='S(0)', src_data_rank=0, requires_grad=False, is_meta=False), rank 1 with "
        "Arguments(shape=(4, 2), dtype='float32', layout='S(1)', src_data_rank=0, requires_grad=False, "
        "is_meta=False); every rank must pass the same but for its own part"
    )


class LongSignature(NamedTuple):
    names: str


def long_signatures():
    signature = LongSignature("x" * 2000 + str(dist.get_rank()))
    with pytest.raises(LongmeshError) as told:
        agree_on_mesh("a call", signature, None, cpu_mesh(2))
    return str(told.value)


def test_descriptions_that_differ_only_at_their_ends(pool):
    for text in pool.run(long_signatures, ranks=2):
        assert "a call: the ranks were called with different arguments" in text
        assert "only after the first 1024 bytes" in text
