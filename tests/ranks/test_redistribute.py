"""Redistribution on real gloo ranks: values, gradients, and the bytes that were promised."""

import random

import pytest
import torch
import torch.distributed as dist

from longmesh import DTensor, Layout, Partial, Replicate, Shard, distribute_tensor, plan_redistribute
from longmesh.comm import comm_of, record_comm
from longmesh.testing import cpu_mesh
from support.layouts import random_layout
from support.simulate import cut

MESHES = {1: [(1,)], 2: [(2,), (1, 2)], 3: [(3,)], 4: [(4,), (2, 2), (2, 1, 2)]}
SIZES = (0, 1, 2, 3, 5, 7, 8)


def term(whole, layout, coordinate, seed):
    """This rank's local tensor of a tensor laid out as `layout` (terms of pending reductions are random)."""
    local = cut(whole, layout, coordinate).clone()
    for axis in layout.partial_axes:
        op, size, place = layout.placements[axis].reduce_op, layout.mesh.sizes[axis], coordinate[axis]
        if op in ("sum", "avg"):
            scale = size if op == "avg" else 1
            share = torch.full_like(local, float(place + seed % 3))
            rest = sum(range(1, size)) + (size - 1) * (seed % 3)
            local = share if place else local * scale - rest
        elif op == "product":
            local = local if place == seed % size else torch.ones_like(local)
        else:
            away = 1.0 if op == "min" else -1.0
            local = local if place == seed % size else local + away * (place + 1)
    return local


def random_cases(mesh_shape, count, seed, differentiable):
    mesh = cpu_mesh(*mesh_shape)
    rng = random.Random(seed)
    ops = ("sum", "avg") if differentiable else ("sum", "avg", "product", "min", "max")
    for number in range(count):
        shape = tuple(rng.choice(SIZES) for _ in range(rng.randint(1, 3)))
        mesh_of = Layout.replicated(mesh).mesh
        src, dst = (random_layout(rng, mesh_of, len(shape), ops) for _ in range(2))
        whole = torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=torch.float64).view(shape)
        yield mesh, src, dst, whole, number


def check_values(mesh_shape, count, seed):
    """Move random tensors; every rank must end with what direct slicing gives, having sent what was promised."""
    for mesh, src, dst, whole, number in random_cases(mesh_shape, count, seed, differentiable=False):
        where = comm_of(mesh).coordinate
        local = term(whole, src, where, number)
        x = DTensor.from_local(local, mesh, src.placements, shape=whole.shape, shard_order=src.shard_order)
        with record_comm() as log:
            y = x.redistribute(
                placements=dst.placements, shard_order=dst.shard_order, async_op=number % 2 == 0
            )
            y.to_local() + 0
        plan = plan_redistribute(src, dst, shape=whole.shape, itemsize=8)
        sent = torch.tensor(log.total_bytes)
        dist.all_reduce(sent)
        assert int(sent) == plan.total_bytes, (plan.explain(), log.events)
        assert len(log.events) == plan.num_collectives
        assert tuple(y.to_local().shape) == dst.local_shape(whole.shape, where)
        assert torch.allclose(y.full_tensor(), whole), plan.explain()
        assert torch.allclose(x.full_tensor(), whole), "the source changed"


def check_gradients(mesh_shape, count, seed):
    """y = redistribute(x) is the identity on the global tensor, so is its gradient: in x's layout."""
    for mesh, src, dst, whole, number in random_cases(mesh_shape, count, seed, differentiable=True):
        where = comm_of(mesh).coordinate
        local = term(whole, src, where, number).requires_grad_()
        x = DTensor.from_local(local, mesh, src.placements, shape=whole.shape, shard_order=src.shard_order)
        y = x.redistribute(placements=dst.placements, shard_order=dst.shard_order)
        weight = torch.arange(whole.numel(), dtype=torch.float64).view(whole.shape) - 3
        (y.full_tensor() * weight).sum().backward()
        expected = cut(weight, src, where)
        for axis, placement in enumerate(src.placements):
            if placement == Partial("avg"):
                expected = expected / src.mesh.sizes[axis]
        assert torch.allclose(local.grad, expected), plan_redistribute(src, dst, shape=whole.shape).explain()


CASES = [(ranks, shape) for ranks, shapes in MESHES.items() for shape in shapes]


@pytest.mark.parametrize(("ranks", "mesh_shape"), CASES)
def test_values_and_bytes(pool, ranks, mesh_shape):
    assert pool.run(check_values, mesh_shape, 60, 1, ranks=ranks) == [None] * ranks


@pytest.mark.parametrize(("ranks", "mesh_shape"), CASES)
def test_gradients(pool, ranks, mesh_shape):
    assert pool.run(check_gradients, mesh_shape, 60, 2, ranks=ranks) == [None] * ranks


def move_every_dtype():
    mesh = cpu_mesh(3)
    seen = []
    for dtype in (
        torch.bool,
        torch.int16,
        torch.uint16,
        torch.int64,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.complex64,
    ):
        whole = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0]).to(dtype)
        x = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        back = x.redistribute(placements=[Partial()]).redistribute(placements=[Replicate()])
        seen.append((str(dtype), torch.equal(x.full_tensor(), whole), torch.equal(back.to_local(), whole)))
    return seen


def test_every_dtype_travels_and_reduces(pool):
    for row in pool.run(move_every_dtype, ranks=3)[0]:
        assert row[1:] == (True, True), row


def permuted_mesh():
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", torch.tensor([[3, 1], [0, 2]]))
    whole = torch.arange(35.0).view(7, 5)
    x = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    moved = x.redistribute(placements=[Shard(1), Shard(1)], shard_order=[(1, (1, 0))])
    terms = DTensor.from_local(
        torch.full((3,), float(dist.get_rank())), mesh, [Partial("max"), Partial("max")]
    )
    return (
        torch.equal(x.full_tensor(), whole),
        torch.equal(moved.full_tensor(), whole),
        terms.full_tensor().tolist(),
    )


def test_ranks_of_a_mesh_in_any_order(pool):
    assert pool.run(permuted_mesh, ranks=4) == [(True, True, [3.0] * 3)] * 4


def call_sites():
    mesh = cpu_mesh(2, names=("tp",))
    x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)], src_data_rank=None)
    with record_comm() as outer, record_comm() as inner:
        x.full_tensor()
    event = outer.events[0]
    return inner.events == outer.events, outer.counts, event.axes, event.shape, event.dtype, event.call_site


def test_recorder_tells_what_ran_and_from_where(pool):
    same, counts, axes, shape, dtype, site = pool.run(call_sites, ranks=2)[0]
    assert same
    assert counts == {"all_gather": 1}
    assert (axes, shape, dtype) == (("axis 'tp'",), (2,), "float32")
    assert "test_redistribute.py" in site
