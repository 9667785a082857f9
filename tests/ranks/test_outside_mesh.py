"""A program in which every rank uses DTensors of a sub-mesh: ranks outside have empty parts, and nobody waits."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import longmesh
from longmesh import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from longmesh.errors import LongmeshError
from longmesh.experimental import local_map
from longmesh.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from longmesh.tensor.flex import flex_attention
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


def on_two_meshes():
    """A parameter on part of the ranks beside one on all: steps need nothing of each other, a common norm does."""
    torch.manual_seed(0)
    wholes = [torch.randn(5, 2), torch.randn(4, 3)]
    meshes = [sub_mesh(), cpu_mesh(3)]
    differences, texts = [], []
    for optimizer in (torch.optim.SGD, torch.optim.AdamW):
        plain = [nn.Parameter(w.clone()) for w in wholes]
        parts = [
            nn.Parameter(distribute_tensor(w, m, [Shard(0)])) for w, m in zip(wholes, meshes, strict=True)
        ]
        for parameters in (plain, parts):
            for p in parameters:
                p.square().sum().backward()
            optimizer(parameters, lr=0.1, foreach=True).step()
        for p, q in zip(plain, parts, strict=True):
            found = q.full_tensor()
            differences.append((found - p).abs().max().item() if found.numel() else 0.0)
        try:
            torch.nn.utils.clip_grad_norm_(parts, 0.5)
        except LongmeshError as error:
            texts.append(str(error))
    return differences, texts


def test_on_two_meshes(pool):
    for differences, texts in pool.run(on_two_meshes, ranks=3):
        assert max(differences) < 1e-6
        assert ["one op on tensors of two meshes" in text for text in texts] == [True, True]


def by_functions(seed):
    """Per function: placements, shape and dtype of its result and of its input's gradient, and the sizes of parts."""
    mesh = sub_mesh()
    torch.manual_seed(seed)
    found = {}

    def record(name, whole, placements, function):
        x = distribute_tensor(whole, mesh, placements).requires_grad_()
        out = function(x)
        weight = distribute_tensor(torch.ones(out.shape), mesh, [Replicate()])
        (out * weight).sum().backward()
        kept = [(t.placements, tuple(t.shape), t.dtype, t.to_local().numel()) for t in (out, x.grad)]
        found[name] = kept, x.grad.full_tensor()
        if "entropy" in name:
            (first,) = torch.autograd.grad((function(x) * weight).sum(), x, create_graph=True)
            first.square().sum().backward()

    logits, target = torch.randn(5, 7), torch.tensor([0, 6, 3, 2, 1])
    for reduction in ("mean", "sum", "none"):
        with loss_parallel():
            record(
                f"cross entropy, {reduction}",
                logits,
                [Shard(1)],
                lambda x, r=reduction: nn.functional.cross_entropy(x, target, reduction=r),
            )
    tokens = torch.randn(1, 2, 5, 8)
    record(
        "flex", tokens, [Shard(2)], lambda x: flex_attention(x, x, x, lambda s, b, h, q, k: s - (q - k).abs())
    )
    record("flex, lse", tokens, [Shard(1)], lambda x: flex_attention(x, x, x, return_lse=True)[1])
    twice = local_map(lambda part: torch.cat([part, part], -1), [Shard(0)], ([Shard(0)],))
    record("local_map, uneven", logits, [Shard(0)], twice)
    record("local_map, even", logits[:4], [Shard(0)], twice)
    total = local_map(lambda part: part.sum(0), [Partial()], ([Shard(0)],))
    record("local_map, partial", logits, [Shard(0)], total)
    for backend in ("eager", "aot_eager"):
        compiled = torch.compile(lambda x: (x * 2).softmax(0) @ x.t(), backend=backend)
        record(f"compile, {backend}", logits, [Shard(0)], compiled)
    torch.compiler.reset()
    return found


def test_functions_do_nothing_outside(pool):
    outside, *inside = pool.run(by_functions, 1, ranks=3)
    assert len(outside) == 10
    for name, (kept, grad) in outside.items():
        assert grad.numel() == 0, name
        for (placements, shape, dtype, elements), (*here, there) in zip(
            kept, inside[0][name][0], strict=True
        ):
            assert [placements, shape, dtype] == here, name
            assert elements == 0 and there > 0, name
        assert torch.equal(inside[0][name][1], inside[1][name][1]), name


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
