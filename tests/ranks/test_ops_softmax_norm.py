"""Softmax and norms on real ranks: values, gradients, running statistics, and what travels."""

import pytest
import torch
from torch.nn import functional as F

from longmesh import Replicate, Shard, distribute_tensor
from longmesh.comm import record_comm
from longmesh.testing import cpu_mesh
from support.op_check import compare_op

MESHES = {3: (3,), 4: (2, 2)}


def softmaxes(mesh_shape):
    torch.manual_seed(0)
    found = []
    for shape in ((9, 5), (1, 7)):
        for dim in (0, -1):
            for op in (torch.softmax, torch.log_softmax):
                found += compare_op(
                    lambda x, d=dim, o=op: o(x, d), [torch.randn(shape)], mesh_shape, trials=3
                )
    masked = torch.randn(5, 9).masked_fill(torch.rand(5, 9) < 0.7, float("-inf"))
    found += compare_op(
        lambda x: torch.softmax(x, 1), [masked], mesh_shape, trials=2, partials=(), grad=False
    )
    found += compare_op(
        lambda x: torch.softmax(x, 1),
        [masked.bfloat16()],
        mesh_shape,
        partials=(),
        grad=False,
        tolerance=1e-2,
    )
    return found


@pytest.mark.parametrize("ranks", MESHES)
def test_softmax(pool, ranks):
    assert pool.run(softmaxes, MESHES[ranks], ranks=ranks)[0] == []


def layer_norms(mesh_shape):
    torch.manual_seed(0)
    found = []
    for shape, count in (((9, 5), 1), ((2, 3, 5), 2)):
        last = shape[-count:]
        tensors = [torch.randn(shape), torch.randn(last), torch.randn(last)]
        for n in (1, 3):
            found += compare_op(
                lambda x, *wb, k=last: F.layer_norm(x, k, *wb), tensors[:n], mesh_shape, seed=n, trials=3
            )
        found += compare_op(
            lambda x, *w, k=last: F.rms_norm(x, k, *w),
            tensors[:2],
            mesh_shape,
            seed=n,
            trials=2,
            may_replicate=True,
        )
    return found


@pytest.mark.parametrize("ranks", MESHES)
def test_layer_and_rms_norm(pool, ranks):
    assert pool.run(layer_norms, MESHES[ranks], ranks=ranks)[0] == []


def other_norms(mesh_shape):
    torch.manual_seed(0)
    found = []
    x, w = torch.randn(5, 6, 3), torch.randn(6)
    for n in (1, 3):
        given = [x, w, w][:n]
        for fn in (
            lambda x, *wb: F.group_norm(x, 3, *wb),
            lambda x, *wb: F.batch_norm(x, None, None, *wb, training=True),
            lambda x, *wb: F.instance_norm(x, None, None, *wb),
        ):
            found += compare_op(fn, given, mesh_shape, trials=2, may_replicate=True)
    stats = [torch.randn(6), torch.rand(6) + 0.5]
    found += compare_op(
        lambda x, w, m, v: F.batch_norm(x, m.detach(), v.detach(), w, w),
        [x, w, *stats],
        mesh_shape,
        trials=2,
        may_replicate=True,
    )
    found += compare_op(
        lambda v, g: torch._weight_norm(v, g, 0),
        [torch.randn(4, 3), torch.randn(4, 1)],
        mesh_shape,
        trials=2,
        may_replicate=True,
    )
    found += compare_op(lambda x: F.normalize(x, dim=1), [x], mesh_shape, trials=2, may_replicate=True)
    found += compare_op(lambda x: torch.renorm(x, 2, 0, 1.0), [x], mesh_shape, trials=2, may_replicate=True)
    return found


@pytest.mark.parametrize("ranks", MESHES)
def test_group_batch_and_instance_norm(pool, ranks):
    assert pool.run(other_norms, MESHES[ranks], ranks=ranks)[0] == []


def running_statistics():
    mesh = cpu_mesh(3)
    torch.manual_seed(0)
    whole = torch.randn(7, 4, 2)
    found = []
    for placement in (Shard(0), Shard(1), Shard(2), Replicate()):
        mean, var = torch.zeros(4), torch.ones(4)
        F.batch_norm(whole, mean, var, training=True, momentum=0.3)
        means, vars_ = (distribute_tensor(t, mesh, [Replicate()]) for t in (torch.zeros(4), torch.ones(4)))
        F.batch_norm(distribute_tensor(whole, mesh, [placement]), means, vars_, training=True, momentum=0.3)
        found.append(torch.allclose(means.full_tensor(), mean) and torch.allclose(vars_.full_tensor(), var))
    return found


def test_running_statistics_are_those_of_the_whole_batch(pool):
    assert pool.run(running_statistics, ranks=3) == [[True] * 4] * 3


def traffic():
    mesh = cpu_mesh(2)
    x = distribute_tensor(torch.randn(4, 1000), mesh, [Shard(1)]).requires_grad_()
    with record_comm() as log:
        y = torch.softmax(x, 1)
        forward = len(log.events)
        (y * y).sum().backward()
    return forward, len(log.events), max(e.sent_bytes for e in log.events), y.placements, x.grad.placements


def test_softmax_over_a_cut_dim_sends_two_small_reductions(pool):
    forward, both, largest, placements, of_grad = pool.run(traffic, ranks=2)[0]
    assert (forward, both, placements, of_grad) == (2, 3, (Shard(1),), (Shard(1),))
    assert largest <= 4 * 8
