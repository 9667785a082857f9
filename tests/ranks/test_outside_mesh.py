"""A program in which every rank uses DTensors of a sub-mesh: ranks outside have empty parts, and nobody waits."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import longmesh
from longmesh import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from longmesh.errors import LongmeshError
from longmesh.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from longmesh.testing import cpu_mesh

INSIDE = [1, 2]  # of 3 ranks


def sub_mesh():
    return DeviceMesh("cpu", INSIDE)


def make_and_move():
    """Per case: placements, global shape, shape of the part, shape of full_tensor()."""
    mesh = sub_mesh()
    whole = torch.arange(15.0).view(5, 3)
    x = distribute_tensor(whole, mesh, [Shard(0)])
    local = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
    made = {
        "distribute": x,
        "from_local": local,
        "from_local, checked": DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)], run_check=True),
        "zeros": longmesh.zeros(5, 3, device_mesh=mesh, placements=[Shard(1)]),
        "randn": longmesh.randn(5, 3, device_mesh=mesh, placements=[Shard(0)]),
        "redistribute": x.redistribute(placements=[Shard(1)]),
        "product": x @ x.t(),
        "sum": x.sum(0),
        "cumsum": x.cumsum(0),
        "slice": x[1:4],
        "topk": x.topk(2, 0)[1],
        "softmax": x.softmax(0),
        "cat": torch.cat([x, x]),
        "in place": x.clone().mul_(2).add_(1),
        "dropout": nn.functional.dropout(x, 0.5),
    }
    found = {}
    for name, t in made.items():
        found[name] = (
            t.placements,
            tuple(t.shape),
            t.dtype,
            tuple(t.to_local().shape),
            t.full_tensor().shape,
        )
    return mesh.get_coordinate() is not None, found, longmesh.get_rng_state()


def test_make_and_move(pool):
    results = pool.run(make_and_move, ranks=3)
    assert [inside for inside, _, _ in results] == [False, True, True]
    assert len({state for _, _, state in results}) == 1
    outside, inside = results[0][1], results[1][1]
    assert len(outside) == 15
    for name, (placements, shape, dtype, part, full) in outside.items():
        assert (placements, shape, dtype) == inside[name][:3], name
        assert part == (0,) and tuple(full) == (0,), name
        assert tuple(inside[name][4]) == shape, name


def draws_agree():
    """Random ops of a sub-mesh count on every rank, so that the world draws alike afterwards."""
    mesh = sub_mesh()
    longmesh.manual_seed(3)
    x = longmesh.rand(4, 4, device_mesh=mesh, placements=[Shard(0)])
    nn.functional.dropout(x, 0.3), torch.rand_like(x), x.bernoulli()
    return longmesh.rand(7, device_mesh=cpu_mesh(3), placements=[Replicate()]).to_local()


def test_draws_agree(pool):
    first, *others = pool.run(draws_agree, ranks=3)
    assert all(torch.equal(first, other) for other in others)


def train(optimizer, styled):
    """Two steps of a small model on the sub-mesh: its weights on the mesh, the shapes of its parts elsewhere."""
    mesh = sub_mesh()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
    plain = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
    plain.load_state_dict(model.state_dict())
    if styled:
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    else:
        distribute_module(model, mesh)
    x = torch.randn(3, 4)
    for module in (plain, model):
        steps = getattr(torch.optim, optimizer)(module.parameters(), lr=0.1)
        for _ in range(2):
            given = x if styled or module is plain else distribute_tensor(x, mesh, [Replicate()])
            module(given).square().sum().backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            steps.step()
            steps.zero_grad()
    parts = [tuple(p.to_local().shape) for p in model.parameters()]
    if mesh.get_coordinate() is None:
        return parts, None
    both = zip(model.parameters(), plain.parameters(), strict=True)
    return parts, max((a.full_tensor() - b).abs().max().item() for a, b in both)


@pytest.mark.parametrize("styled", [False, True])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_train(pool, optimizer, styled):
    outside, *inside = pool.run(train, optimizer, styled, ranks=3)
    assert outside == ([(0,)] * 4, None)
    for parts, error in inside:
        assert (0,) not in parts and error < 1e-5


def refused(what):
    x = distribute_tensor(torch.ones(3), sub_mesh(), [Shard(0)])
    calls = {
        "item": lambda: x.sum().item(),
        "nonzero": lambda: x.nonzero(),
        "equal": lambda: torch.equal(x, x),
    }
    try:
        return calls[what]() is not None
    except LongmeshError as error:
        return str(error)


@pytest.mark.parametrize("what", ["item", "nonzero", "equal"])
def test_what_needs_data_is_refused_outside(pool, what):
    outside, *inside = pool.run(refused, what, ranks=3)
    assert inside == [True, True]
    assert "on rank 0, which is not in the mesh [1, 2]: its result depends on data" in outside
