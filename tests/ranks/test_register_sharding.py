"""register_sharding: ops of a library of one's own on DTensors, and rules that replace ours."""

import pytest
import torch
import torch.distributed as dist

from longmesh import Partial, Replicate, Shard, distribute_tensor
from longmesh.comm import record_comm
from longmesh.errors import LongmeshError
from longmesh.experimental import register_sharding
from longmesh.rules.table import registered
from longmesh.tensor.dispatch import dispatch
from longmesh.testing import cpu_mesh

LIBRARY = torch.library.Library("longmesh_test", "DEF")
LIBRARY.define("weighted(Tensor x, Tensor[] more, *, Tensor? weight=None, float factor=1.0) -> Tensor")
LIBRARY.define("note(Tensor x) -> ()")
LIBRARY.define("push_(Tensor(a!) x, Tensor y) -> Tensor(a!)")
LIBRARY.define("count(Tensor x, Tensor(a!) total) -> ()")
LIBRARY.define("rows(Tensor x, int dim) -> (Tensor, Tensor)")
LIBRARY.define("blind(Tensor x) -> Tensor")
SEEN = []


def _weighted(x, more, *, weight=None, factor=1.0):
    total = sum(more, x) * factor
    return total if weight is None else total * weight


def _count(x, total):
    total += x.sum()


for name, kernel in {
    "weighted": _weighted,
    "note": lambda x: SEEN.append(tuple(x.shape)) if not x.is_meta else None,
    "push_": lambda x, y: x.add_(y),
    "count": _count,
    "rows": lambda x, dim: (x.sum(dim), x * 2),
}.items():
    LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
LIBRARY.impl("blind", lambda x: x.clone(), "CPU")
ops = torch.ops.longmesh_test


def weighted_lines(x, more, *, weight=None, factor=1.0):
    weights = [] if weight is None else [Shard(0)]
    return [
        ([Shard(0)], [Shard(0), *[Shard(0)] * len(more), *weights]),
        ([Shard(1)], [Shard(1), *[Shard(1)] * len(more), *[Replicate() for _ in weights], None]),
    ]


def kwargs_and_lists():
    mesh = cpu_mesh(dist.get_world_size())
    torch.manual_seed(0)
    whole = [torch.randn(5, 3) for _ in range(3)]
    weight = torch.randn(5, 1)
    samples = [((whole[0], whole[1:]), {"weight": weight, "factor": 0.5}), ((whole[0], []), {})]
    register_sharding(ops.weighted.default, check_with=samples)(weighted_lines)
    expected = _weighted(whole[0], whole[1:], weight=weight, factor=2.0)
    for placement in (Shard(0), Shard(1), Replicate()):
        cut = [distribute_tensor(t, mesh, [placement]) for t in whole]
        held = distribute_tensor(weight, mesh, [Shard(0) if placement == Shard(0) else Replicate()])
        with record_comm() as log:
            out = ops.weighted(cut[0], cut[1:], weight=held, factor=2.0)
        assert out.placements == (placement,) and not log.events
        torch.testing.assert_close(out.full_tensor(), expected)
    # A pending sum fits no line: it is brought to one.
    pending = distribute_tensor(whole[0], mesh, [Partial()])
    torch.testing.assert_close(ops.weighted(pending, []).full_tensor(), whole[0])
    return True


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_keyword_tensors_and_lists(pool, ranks):
    assert pool.run(kwargs_and_lists, ranks=ranks) == [True] * ranks


def no_outputs_and_writes():
    mesh = cpu_mesh(2)
    register_sharding(ops.note.default)(lambda x: [([], [Shard(0)])])
    register_sharding(ops.push_.default, check_with=[(torch.randn(5, 3), torch.randn(5, 3))])(
        lambda x, y: [([Shard(0)], [Shard(0), Shard(0)])]
    )
    register_sharding(ops.count.default, check_with=[(torch.randn(5), torch.ones(()))])(
        lambda x, total: [([], [Replicate(), Replicate()])]
    )
    SEEN.clear()
    x = distribute_tensor(torch.arange(10.0).view(5, 2), mesh, [Shard(0)])
    assert ops.note(x) is None
    assert [(3 if dist.get_rank() == 0 else 2, 2)] == SEEN

    whole = torch.arange(10.0).view(5, 2)
    for placement in (Shard(0), Shard(1), Replicate(), Partial()):  # written where it lies, or brought home
        x = distribute_tensor(whole, mesh, [placement])
        y = distribute_tensor(whole, mesh, [Shard(1)])
        assert ops.push_(x, y) is x and x.placements == (placement,)
        torch.testing.assert_close(x.full_tensor(), whole * 2)
    part = x[1:3]
    ops.push_(part, distribute_tensor(torch.ones(2, 2), mesh))
    torch.testing.assert_close(part.full_tensor(), whole[1:3] * 2 + 1)

    total = distribute_tensor(torch.ones(()), mesh)
    assert ops.count(distribute_tensor(whole, mesh, [Shard(0)]), total) is None
    assert total.full_tensor().item() == 46.0
    return True


def test_no_outputs_and_writes(pool):
    assert pool.run(no_outputs_and_writes, ranks=2) == [True] * 2


def replaces_ours():
    """A rule for an op that has one, with a program: ours is not asked any more, and comes back when it is removed."""
    mesh = cpu_mesh(2)
    op = torch.ops.aten._softmax.default
    whole = torch.randn(4, 6)
    x = distribute_tensor(whole, mesh, [Shard(1)])
    assert torch.softmax(x, 1).placements == (Shard(1),)

    @register_sharding(op)
    def softmax_sharding(x, dim, half_to_float):
        dim = dim % x.ndim
        lines = [([Replicate()], [Replicate(), None, None])]
        return lines + [([Shard(d)], [Shard(d), None, None]) for d in range(x.ndim) if d != dim]

    try:
        out = torch.softmax(x, 1)
        assert out.placements != (Shard(1),)
        torch.testing.assert_close(out.full_tensor(), whole.softmax(1))
    finally:
        registered.pop("_softmax.default")
        dispatch.forget_plans()
    return torch.softmax(x, 1).placements == (Shard(1),)


def test_replaces_a_rule_of_ours(pool):
    assert pool.run(replaces_ours, ranks=2) == [True] * 2


def texts():
    mesh = cpu_mesh(2)
    x = distribute_tensor(torch.randn(5, 3), mesh, [Shard(0)])
    found = []

    def attempt(fn):
        with pytest.raises(LongmeshError) as raised:
            fn()
        found.append(str(raised.value))

    sample = [(torch.arange(15.0).view(5, 3), 0)]
    wrong = {
        "a sum of a cut dim is no shard": lambda x, dim: [([Replicate(), Shard(0)], [Shard(0), None])],
        "the sum is pending, the product not": lambda x, dim: [([Partial(), Partial()], [Shard(0), None])],
        "one output is missing": lambda x, dim: [([Partial()], [Shard(0), None])],
        "no such dim": lambda x, dim: [([Partial(), Shard(2)], [Shard(0), None])],
    }
    for lines in wrong.values():
        attempt(lambda lines=lines: register_sharding(ops.rows.default, check_with=sample)(lines))
    assert registered.get("longmesh_test.rows.default") is None  # nothing was registered
    attempt(lambda: register_sharding(ops.rows))
    register_sharding(ops.blind.default)(lambda x: [([Shard(0)], [Shard(0)])])
    attempt(lambda: ops.blind(x))
    return found


def test_error_texts(pool):
    first, second = pool.run(texts, ranks=2)
    assert first == second
    assert first == [
        (
            "register_sharding(longmesh_test.rows.default): (Shard(dim=0),) -> (Replicate(), Shard(dim=0)) does "
            "not hold on 2 ranks for inputs (5, 3): output 0 differs by 25; correct or drop this line"
        ),
        (
            "register_sharding(longmesh_test.rows.default): (Shard(dim=0),) -> (Partial(sum), Partial(sum)) does "
            "not hold on 2 ranks for inputs (5, 3): output 1 is pending and has terms of shape (3, 3), not (5, "
            "3); correct or drop this line"
        ),
        (
            "register_sharding(longmesh_test.rows.default): line 0 has 1 output and 1 input placements, the call "
            "has 2 and 1 tensors; list one per tensor in the order of longmesh_test::rows(Tensor x, int dim) -> "
            "(Tensor, Tensor)"
        ),
        (
            "register_sharding(longmesh_test.rows.default), line 0: Shard(dim=2) is out of range for a tensor of "
            "shape (5, 3); list only dims that it has"
        ),
        (
            "register_sharding takes an op overload, got <OpOverloadPacket(op='longmesh_test.rows')>; write e.g. "
            "torch.ops.aten.add.Tensor"
        ),
        (
            "the output shapes of longmesh_test.blind.default are not known: it has no kernel for meta tensors; add "
            "one with torch.library.register_fake('longmesh_test::blind')"
        ),
    ]
