"""capture: a traced train step gives what the eager one gives, with the same collectives and only local ops."""

from typing import NamedTuple

import pytest
import torch

import longmesh
from longmesh import Replicate, Shard, distribute_tensor
from longmesh.comm import record_comm
from longmesh.errors import LongmeshError
from longmesh.testing import cpu_mesh


def make_params(mesh):
    torch.manual_seed(0)
    first = distribute_tensor(torch.randn(7, 5), mesh, [Shard(0)]).requires_grad_()
    second = distribute_tensor(torch.randn(3, 7), mesh, [Shard(1)]).requires_grad_()
    return [first, second]


def step(params, x, rate=0.1):
    loss = (torch.relu(x @ params[0].t()) @ params[1].t()).square().sum()
    grads = torch.autograd.grad(loss, params)
    with torch.no_grad():
        for p, g in zip(params, grads, strict=True):
            p -= rate * g
    return {"loss": loss.detach()}


def train(mesh_size):
    mesh = cpu_mesh(mesh_size)
    inputs = [torch.randn(n, 5, generator=torch.Generator().manual_seed(n)) for n in (4, 4, 6, 4)]
    curves, weights, counts = [], [], []
    for run in (step, longmesh.capture(step)):
        params, curve = make_params(mesh), []
        for x in inputs:
            batch = distribute_tensor(x, mesh, [Replicate()])
            with record_comm() as log:
                curve.append(run(params, batch, rate=0.01)["loss"].full_tensor().item())
        curves.append(curve)
        weights.append([p.full_tensor() for p in params])
        counts.append(log.counts)
    same = all(torch.allclose(a, b) for a, b in zip(*weights, strict=True))
    return torch.allclose(torch.tensor(curves[0]), torch.tensor(curves[1])), same


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_captured_train_step_is_the_eager_one(pool, ranks):
    assert pool.run(train, ranks, ranks=ranks, timeout=300.0) == [(True, True)] * ranks


def traced_ops():
    mesh = cpu_mesh(2)
    run = longmesh.capture(step)
    batch = distribute_tensor(torch.ones(4, 5), mesh, [Replicate()])
    run(make_params(mesh), batch)
    run(make_params(mesh), batch)
    (trace,) = run._traces.values()
    return [str(node.target) for node in trace.graph.graph.nodes if node.op == "call_function"]


def test_a_trace_holds_local_ops_and_collectives_only(pool):
    ops = pool.run(traced_ops, ranks=2, timeout=300.0)[0]
    assert any("_c10d_functional" in op for op in ops)
    assert all(op.startswith(("aten.", "_c10d_functional.", "<built-in")) for op in ops)


def mistakes():
    mesh = cpu_mesh(2)
    params = make_params(mesh)
    texts = []
    for fn in (lambda p: p[0] * 2, lambda p: torch.rand_like(p[0].detach())):
        try:
            longmesh.capture(fn)(params)
        except LongmeshError as error:
            texts.append(str(error))
    return texts


def test_what_a_replay_could_not_repeat_is_refused(pool):
    gradient, random = pool.run(mistakes, ranks=2, timeout=300.0)[0]
    assert "take gradients inside" in gradient
    assert "draw them outside and pass them in" in random


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


def structures():
    """Arguments and results in containers: the same structure is replayed, another one is traced."""
    mesh = cpu_mesh(2)
    x, y = (distribute_tensor(torch.full((5,), float(n)), mesh, [Shard(0)]) for n in (2, 3))
    traced = []

    @longmesh.capture
    def combine(given, factor=1.0, **rest):
        traced.append(type(given))
        first, second = given.values() if isinstance(given, dict) else given
        return {"sum": (first + second) * factor, "rest": [value * 2 for value in rest.values()]}

    found = []
    for given in ([x, y], [y, x], (x, y), Pair(x, y), {"a": x, "b": y}, {"b": x, "a": y}):
        result = combine(given, factor=2.0, more=y)
        found.append((result["sum"].full_tensor()[0].item(), result["rest"][0].full_tensor()[0].item()))
    return found, traced


def test_arguments_in_containers(pool):
    for found, traced in pool.run(structures, ranks=2):
        assert found == [(10.0, 6.0)] * 6
        assert traced == [list, tuple, Pair, dict, dict]
