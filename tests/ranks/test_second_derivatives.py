"""Derivatives of derivatives, through every style and through what DTensors pass on the way."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from longmesh import DTensor, Replicate, Shard, distribute_tensor
from longmesh.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from longmesh.testing import cpu_mesh

SHARD = (Shard(0), Shard(1), Replicate())


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def penalised(run, x, parameters):
    """The gradients of a loss in which a gradient stands."""
    x = x.detach().requires_grad_()
    y = run(x).tanh()
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    wanted = [x, *parameters]
    return [whole(t) for t in torch.autograd.grad(whole(g.square().sum()) + whole(y.sum()), wanted)]


MODELS = {
    "columns, rows": (
        lambda: nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)),
        {"0": ColwiseParallel(), "2": RowwiseParallel()},
    ),
    "DTensors between": (
        lambda: nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)),
        {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()},
    ),
    "no bias": (
        lambda: nn.Sequential(nn.Linear(6, 7, bias=False), nn.Linear(7, 6, bias=False)),
        {"0": ColwiseParallel(), "1": RowwiseParallel()},
    ),
    "sequence": (
        lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6), nn.RMSNorm(6)),
        {
            "0": SequenceParallel(sequence_dim=0),
            "1": ColwiseParallel(input_layouts=Shard(0)),
            "3": RowwiseParallel(output_layouts=Shard(0)),
            "4": SequenceParallel(sequence_dim=0, use_local_output=False),
        },
    ),
}


def through_styles(name):
    make, plan = MODELS[name]
    mesh = cpu_mesh(2)
    torch.manual_seed(0)
    plain = make()
    model = parallelize_module(copy.deepcopy(plain), mesh, plan)
    x = torch.randn(4, 6)
    expected = penalised(plain, x, list(plain.parameters()))
    if name == "sequence":
        x = distribute_tensor(x, mesh, [Shard(0)])
    found = penalised(model, x, list(model.parameters()))
    return [float((a - b).abs().max()) for a, b in zip(expected, found, strict=True)]


@pytest.mark.parametrize("name", list(MODELS))
def test_styles(pool, name):
    for differences in pool.run(through_styles, name, ranks=2):
        assert len(differences) > 2 and max(differences) < 1e-5


def of_tables_and_losses():
    """The square of a gradient of a table, and of logits."""
    mesh = cpu_mesh(2)
    torch.manual_seed(0)
    table = nn.Embedding(7, 4)
    tokens, target = torch.tensor([0, 3, 3, 6]), torch.tensor([1, 0, 3, 2])
    differences = []
    for style in (RowwiseParallel(input_layouts=Replicate()), ColwiseParallel(output_layouts=Replicate())):
        sharded = parallelize_module(copy.deepcopy(table), mesh, style)
        grads = []
        for module in (table, sharded):
            (g,) = torch.autograd.grad(module(tokens).pow(3).sum(), module.weight, create_graph=True)
            (second,) = torch.autograd.grad(whole(g.square().sum()), module.weight)
            grads.append(whole(second))
        differences.append(float((grads[0] - grads[1]).abs().max()))
    logits = torch.randn(4, 5)
    grads = []
    for x in (logits, distribute_tensor(logits, mesh, [Shard(1)])):
        x = x.detach().requires_grad_()
        with loss_parallel():
            loss = F.cross_entropy(x, target, label_smoothing=0.1)
            (g,) = torch.autograd.grad(loss, x, create_graph=True)
            (second,) = torch.autograd.grad(whole(g.square().sum()), x)
        grads.append(whole(second))
    return [*differences, float((grads[0] - grads[1]).abs().max())]


def test_tables_and_losses(pool):
    for differences in pool.run(of_tables_and_losses, ranks=2):
        assert max(differences) < 1e-5


FUNCTIONS = {
    "abs": lambda t: t.abs() * t,
    "softsign": F.softsign,
    "lp_pool": lambda t: F.lp_pool1d(t.abs() + 1, 2, 2),
    "softmax": lambda t: t.softmax(0),
    "layer_norm": lambda t: F.layer_norm(t, (4,)),
    "norm": lambda t: t.norm(),
    "redistributed": lambda t: t.redistribute(placements=[Shard(1)]) if isinstance(t, DTensor) else t,
    "gathered": lambda t: whole(t),
    "local and back": lambda t: (
        DTensor.from_local(t.to_local(), t.device_mesh, t.placements, shape=t.shape)
        if isinstance(t, DTensor)
        else t
    ),
}


def of_functions():
    mesh = cpu_mesh(3)
    torch.manual_seed(0)
    x = torch.randn(4, 4)
    wrong = []
    for name, fn in FUNCTIONS.items():

        def second(t, fn=fn):
            t = t.detach().requires_grad_()
            (g,) = torch.autograd.grad(fn(t).sin().sum(), t, create_graph=True)
            return whole(torch.autograd.grad(whole(g.square().sum()), t)[0])

        for placement in SHARD:
            difference = float((second(x) - second(distribute_tensor(x, mesh, [placement]))).abs().max())
            if difference > 1e-4:
                wrong.append(f"{name} {placement}: {difference}")
    return wrong


def test_functions(pool):
    assert pool.run(of_functions, ranks=3) == [[]] * 3
