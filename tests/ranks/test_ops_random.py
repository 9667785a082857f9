"""Random ops on real ranks: one global tensor whatever the layout and the number of ranks."""

import random

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import longmesh
from longmesh import DTensor, Partial, Replicate, Shard
from longmesh.comm import record_comm
from longmesh.spec import Layout
from longmesh.testing import RankError
from support.layouts import random_layout


def made(value, layout, mesh):
    """A plain tensor as a DTensor: each rank cuts its own part."""
    return longmesh.distribute_tensor(
        value, mesh, layout.placements, src_data_rank=None, shard_order=layout.shard_order
    )


FILLS = {
    "uniform_": lambda x: x.uniform_(-1, 2),
    "normal_": lambda x: x.normal_(1, 2),
    "log_normal_": lambda x: x.log_normal_(),
    "exponential_": lambda x: x.exponential_(2),
    "geometric_": lambda x: x.geometric_(0.3),
    "cauchy_": lambda x: x.cauchy_(),
    "bernoulli_": lambda x: x.bernoulli_(0.4),
    "random_": lambda x: x.random_(),
    "random_to": lambda x: x.random_(10),
    "random_from": lambda x: x.random_(-5, 10),
    "rand_like": torch.rand_like,
    "rand_like f64": lambda x: torch.rand_like(x, dtype=torch.float64),
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 3, 9),
    "randint_like high": lambda x: torch.randint_like(x, 9, dtype=torch.int64),
    "bernoulli": lambda x: torch.bernoulli(x.uniform_()),
    "bernoulli_p": lambda x: torch.bernoulli(x, 0.25),
    "normal": lambda x: torch.normal(x, 2.0),
    "normal std": lambda x: torch.normal(0.0, x.uniform_()),
    "normal both": lambda x: torch.normal(x, torch.ones_like(x)),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "dropout": lambda x: nn.functional.dropout(x, 0.3),
    "dropout_": lambda x: nn.functional.dropout(x, 0.3, inplace=True),
    "alpha_dropout": lambda x: nn.functional.alpha_dropout(x, 0.3, training=True),
    "poisson": lambda x: torch.poisson(x.uniform_(0, 4)),
    "gamma": lambda x: torch._standard_gamma(x.uniform_(1, 4)),
    "rrelu": lambda x: nn.functional.rrelu(x.normal_(), training=True),
    "multinomial": lambda x: torch.multinomial(x.uniform_(0.1, 1), 3),
    "multinomial again": lambda x: torch.multinomial(x.uniform_(0.1, 1), 7, replacement=True),
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "kaiming_normal_": nn.init.kaiming_normal_,
    "xavier_uniform_": nn.init.xavier_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "trunc_normal_": nn.init.trunc_normal_,
    "orthogonal_": nn.init.orthogonal_,
}
SHAPES = ((7, 5), (1, 8))


def results(mesh_shape, seed, names):
    """Every op's global result in a random layout, and that of a second op after it."""
    mesh = init_device_mesh("cpu", mesh_shape)
    rng = random.Random(seed)
    found = {}
    for name in names:
        for shape in SHAPES:
            layout = random_layout(rng, Layout.replicated(mesh).mesh, 2, ())
            longmesh.manual_seed(3)
            x = made(torch.linspace(0.1, 1, 50)[: shape[0] * shape[1]].view(shape), layout, mesh)
            with torch.no_grad():
                y = FILLS[name](x)
            z = torch.rand_like(x)
            found[name, shape] = (y.full_tensor(), z.full_tensor())
    return found


def test_the_same_global_tensor_on_any_mesh_and_layout(pool):
    names = list(FILLS)
    expected = pool.run(results, (1,), 0, names, ranks=1)[0]
    for mesh_shape, ranks in (((3,), 3), ((2, 2), 4)):
        for found in pool.run(results, mesh_shape, 1, names, ranks=ranks):
            for case, (y, z) in expected.items():
                assert found[case][0].dtype == y.dtype
                if case[0] == "orthogonal_":
                    torch.testing.assert_close(found[case][0], y)
                    continue
                assert torch.equal(found[case][0], y), (mesh_shape, case)
                assert torch.equal(found[case][1], z), (mesh_shape, case)


def factories(mesh_shape, placements):
    mesh = init_device_mesh("cpu", mesh_shape)
    longmesh.manual_seed(11)
    with record_comm() as log:
        made = [
            longmesh.rand(9, 5, device_mesh=mesh, placements=placements),
            longmesh.randn((9, 5), dtype=torch.float64, device_mesh=mesh, placements=placements),
            longmesh.randn(
                9, 5, dtype=torch.complex64, requires_grad=True, device_mesh=mesh, placements=placements
            ),
            longmesh.rand(9, 5, dtype=torch.bfloat16, device_mesh=mesh, placements=placements),
        ]
    return [t.detach().full_tensor() for t in made], made[2].requires_grad, len(log.events)


@pytest.mark.parametrize(
    ("mesh_shape", "placements"),
    [
        ((3,), [Shard(0)]),
        ((4,), [Shard(1)]),
        ((2, 2), [Shard(0), Shard(0)]),
        ((2,), [Partial()]),
        ((2,), [Replicate()]),
    ],
)
def test_rand_and_randn(pool, mesh_shape, placements):
    expected, _, _ = pool.run(factories, (1,), [Replicate()], ranks=1)[0]
    ranks = torch.Size(mesh_shape).numel()
    for found, requires_grad, sent in pool.run(factories, mesh_shape, placements, ranks=ranks):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert requires_grad and sent == 0


def dropout_masks():
    mesh = init_device_mesh("cpu", (3,))
    torch.manual_seed(torch.distributed.get_rank())  # torch's own seed does not matter
    x = longmesh.ones(30, 40, device_mesh=mesh, placements=[Shard(0)])
    first, second = (nn.functional.dropout(x, 0.5).full_tensor() for _ in range(2))
    pieces = first.chunk(3)
    return first, second, torch.equal(pieces[0], pieces[1])


def test_dropout_masks_differ_between_shards_and_calls(pool):
    outs = pool.run(dropout_masks, ranks=3)
    for first, second, repeated in outs:
        assert not repeated and not torch.equal(first, second)
        assert torch.equal(first, outs[0][0])
        assert 0.4 < (first == 2).float().mean() < 0.6


def pending(op):
    mesh = init_device_mesh("cpu", (2, 2))
    longmesh.manual_seed(0)
    x = DTensor.from_local(torch.ones(5, 2), mesh, [Shard(1), Partial(op)], shape=(5, 4)).normal_()
    longmesh.manual_seed(0)
    y = longmesh.randn(5, 4, device_mesh=mesh, placements=[Replicate()] * 2)
    kept = nn.functional.dropout(x, 0.5)
    return torch.equal(x.full_tensor(), y.full_tensor()), kept.full_tensor()


@pytest.mark.parametrize("op", ["sum", "avg", "min", "max", "product"])
def test_a_pending_target_holds_the_value(pool, op):
    found = pool.run(pending, op, ranks=4)
    assert [same for same, _ in found] == [True] * 4
    assert all(torch.equal(kept, found[0][1]) for _, kept in found)


def checkpointed(use_reentrant):
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(torch.distributed.get_rank() + 5)
    masks = []

    def block(x, w):
        y = nn.functional.dropout(x * w, 0.5)
        masks.append((y.detach() != 0).full_tensor())
        return nn.functional.dropout(y.sin(), 0.5)

    longmesh.manual_seed(1)
    grads = []
    for _ in range(2):
        x = longmesh.ones(6, 4, device_mesh=mesh, placements=[Shard(0)]).requires_grad_()
        w = longmesh.ones(6, 4, device_mesh=mesh, placements=[Shard(0)]).requires_grad_()
        y = checkpoint(
            block, checkpoint(block, x, w, use_reentrant=use_reentrant), w, use_reentrant=use_reentrant
        )
        y.sum().backward()
        grads.append((y.detach().full_tensor(), w.grad.full_tensor()))
    longmesh.manual_seed(1)
    plain = []
    for _ in range(2):
        x = longmesh.ones(6, 4, device_mesh=mesh, placements=[Shard(0)]).requires_grad_()
        w = longmesh.ones(6, 4, device_mesh=mesh, placements=[Shard(0)]).requires_grad_()
        y = block(block(x, w), w)
        y.sum().backward()
        plain.append((y.detach().full_tensor(), w.grad.full_tensor()))
    return grads, plain


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_repeats_the_masks(pool, use_reentrant):
    for grads, plain in pool.run(checkpointed, use_reentrant, ranks=2):
        for got, want in zip(grads, plain, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert not torch.equal(grads[0][0], grads[1][0])


def twice(x):
    return nn.functional.dropout(x, 0.5), nn.functional.dropout(x, 0.5)


def compiled(backend):
    mesh = init_device_mesh("cpu", (2,))
    torch._dynamo.reset()
    fn = torch.compile(twice, backend=backend, fullgraph=True)
    x = longmesh.ones(9, 16, device_mesh=mesh, placements=[Shard(0)]).requires_grad_()
    ones = torch.ones_like(x.detach())
    runs = []
    for step in (fn, fn, twice, twice):
        if len(runs) in (0, 2):
            longmesh.manual_seed(0)
        a, b = step(x)
        (grad,) = torch.autograd.grad((a, b), x, (ones, 3 * ones))
        runs.append([t.detach().full_tensor() for t in (a, b, grad)])
    return runs


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_function_draws_anew_whenever_it_runs(pool, backend):
    for runs in pool.run(compiled, backend, ranks=2):
        for a, b, grad in runs:
            assert not torch.equal(a, b) and torch.equal(grad, a + 3 * b)
        assert not torch.equal(runs[0][0], runs[1][0])
        for traced, plain in zip(runs[:2], runs[2:], strict=True):
            assert all(torch.equal(t, p) for t, p in zip(traced, plain, strict=True))


def with_generator():
    mesh = init_device_mesh("cpu", (2,))
    x = longmesh.zeros(5, 3, device_mesh=mesh, placements=[Shard(0)])
    generator = torch.Generator().manual_seed(4)
    first = x.normal_(generator=generator).full_tensor()
    state = longmesh.get_rng_state()
    second = nn.init.normal_(x, generator=generator.manual_seed(4)).full_tensor()
    untouched = longmesh.get_rng_state() == state
    third = torch.rand_like(x).full_tensor()
    longmesh.set_rng_state(state)
    return torch.equal(first, second), untouched, torch.equal(third, torch.rand_like(x).full_tensor())


def test_a_generator_and_a_saved_state_repeat(pool):
    assert pool.run(with_generator, ranks=2) == [(True, True, True)] * 2


def too_many():
    mesh = init_device_mesh("cpu", (2,))
    torch.multinomial(longmesh.ones(5, 3, device_mesh=mesh, placements=[Shard(0)]), 4)


def test_errors(pool):
    with pytest.raises(
        RankError, match=r"multinomial of 4 samples \(replacement=False\) from weights of shape \(5, 3\)"
    ):
        pool.run(too_many, ranks=2)
