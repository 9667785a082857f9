"""local_map and implicit_replication on real ranks: uneven parts, gradients, texts."""

import pytest
import torch
import torch.distributed as dist

from longmesh import DTensor, Partial, Replicate, Shard, distribute_tensor
from longmesh.comm import record_comm
from longmesh.errors import LongmeshError
from longmesh.experimental import implicit_replication, local_map
from longmesh.testing import cpu_mesh


def maps():
    mesh = cpu_mesh(dist.get_world_size())
    torch.manual_seed(0)
    for rows in (1, 5, 8, 11):
        whole = torch.randn(rows, 3, requires_grad=True)
        x = distribute_tensor(whole.detach(), mesh, [Shard(0)]).requires_grad_()
        double = local_map(lambda t: (t * 2).sin(), out_placements=[Shard(0)], in_placements=([Shard(0)],))
        out = double(x)
        assert out.shape == whole.shape and out.placements == (Shard(0),)
        torch.testing.assert_close(out.full_tensor(), (whole * 2).sin())
        out.square().sum().backward()
        (whole * 2).sin().square().sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), whole.grad)
        with record_comm() as log:
            double(x)
        assert bool(log.events) == bool(rows % dist.get_world_size())  # sizes travel only where parts differ
    return True


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_uneven_inputs(pool, ranks):
    assert pool.run(maps, ranks=ranks) == [True] * ranks


def products():
    """A product by a piece of its contraction each: pending, or added inside; gradients with other placements."""
    mesh = cpu_mesh(3)
    torch.manual_seed(0)
    w, x = torch.randn(4, 7, requires_grad=True), torch.randn(7, 5, requires_grad=True)
    expected = w @ x
    expected.square().sum().backward()
    columns, rows = [Shard(1)], [Shard(0)]
    cut = [
        distribute_tensor(w.detach(), mesh, columns).requires_grad_(),
        distribute_tensor(x.detach(), mesh, rows).requires_grad_(),
    ]
    pending = local_map(torch.mm, out_placements=[Partial()], in_placements=(columns, rows))(*cut)
    torch.testing.assert_close(pending.full_tensor(), expected.detach())
    pending.redistribute(placements=[Replicate()]).square().sum().backward()
    torch.testing.assert_close(cut[0].grad.full_tensor(), w.grad)

    # Rows of w, all of x: what each rank gives x is a term of its gradient.
    cut = [
        distribute_tensor(w.detach(), mesh, rows).requires_grad_(),
        distribute_tensor(x.detach(), mesh).requires_grad_(),
    ]
    mm = local_map(
        torch.mm,
        out_placements=rows,
        in_placements=(rows, [Replicate()]),
        in_grad_placements=(rows, [Partial()]),
    )
    mm(*cut).square().sum().backward()
    torch.testing.assert_close(cut[1].grad.full_tensor(), x.grad)
    torch.testing.assert_close(cut[0].grad.full_tensor(), w.grad)
    return True


def test_gradients_with_placements_of_their_own(pool):
    assert pool.run(products, ranks=3) == [True] * 3


def structures():
    """Nested arguments, several results, a decorator, a moved input, plain arguments only."""
    mesh = cpu_mesh(2, 2)

    @local_map(
        out_placements=([Shard(0), Shard(1)], None, (Replicate(), Replicate())),
        in_placements=([Shard(0), Shard(1)], None),
        redistribute_inputs=True,
    )
    def fn(pair, *, scale):
        x, label = pair
        return x * scale, label, torch.ones(2)

    whole = torch.arange(15.0).view(5, 3)
    x = distribute_tensor(whole, mesh)
    out, label, ones = fn((x, "name"), scale=2)
    torch.testing.assert_close(out.full_tensor(), whole * 2)
    assert label == "name" and ones.placements == (Replicate(), Replicate())
    assert fn((torch.ones(2), "plain"), scale=3)[0].tolist() == [3.0, 3.0]
    return True


def test_structures(pool):
    assert pool.run(structures, ranks=4) == [True] * 4


def inputs_as_they_are():
    mesh = cpu_mesh(2)
    x = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
    whole = distribute_tensor(torch.arange(3.0), mesh, [Replicate()]).requires_grad_()
    scale = local_map(
        lambda part, rows, factor: part * rows.sum() * factor,
        [Shard(0)],
        ([Shard(0)], [Replicate()], None),
        (None, None, None),
    )
    y = scale(x, whole, 2.0)
    local_map(torch.square, None)(whole).sum().backward()
    return y.placements, y.full_tensor(), whole.grad.placements, whole.grad.full_tensor()


def test_without_in_placements_arguments_are_taken_as_they_are(pool):
    for placements, y, grad_placements, grad in pool.run(inputs_as_they_are, ranks=2):
        assert placements == (Shard(0),) and torch.equal(y, torch.arange(5.0) * 6)
        assert grad_placements == (Replicate(),) and torch.equal(grad, 2 * torch.arange(3.0))


def texts():
    mesh = cpu_mesh(2)
    x = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
    found = []
    for make, args in (
        (lambda: local_map(torch.neg, [Shard(0)], ([Shard(0)], None)), (x,)),
        (lambda: local_map(torch.neg, [Shard(0)], ([Replicate()],)), (x,)),
        (lambda: local_map(torch.add, [Shard(0)], ([Shard(0)], None)), (x, x)),
        (lambda: local_map(lambda t: (t, t), [Shard(0)]), (x,)),
        (lambda: local_map(lambda t: 3, [Shard(0)]), (x,)),
        (lambda: local_map(lambda t: torch.ones(2 + dist.get_rank()), [Shard(0)]), (x,)),
    ):
        with pytest.raises(LongmeshError) as raised:
            make()(*args)
        found.append(str(raised.value))
    return found


def test_error_texts(pool):
    first, second = pool.run(texts, ranks=2)
    assert first == second
    assert first == [
        (
            "local_map: in_placements has 2 entries for 1 (flattened) positional arguments; give one for each, "
            "None for what is not a tensor"
        ),
        (
            "local_map: argument 0 is laid out as (Shard(dim=0),) and in_placements want (Replicate(),); "
            "redistribute() it first, or pass redistribute_inputs=True"
        ),
        (
            "local_map: argument 1 is a DTensor, which expects placements: in_placements has None; give its "
            "placements, e.g. (Shard(dim=0),), or leave in_placements out to take inputs in any layout"
        ),
        (
            "local_map: out_placements has 1 entries for 2 (flattened) results; give a tuple with one for each, "
            "None for what is not a tensor"
        ),
        "local_map: result 0 is a int and has out_placements (Shard(dim=0),); give None for what is not a tensor",
        (
            "local_map: result 0 laid out as S(0) on MeshShape((2,)) would have the shape (5,), of which "
            "coordinate (0,) holds (3,), but its part is (2,); return parts as chunking makes them"
        ),
    ]


def replication():
    mesh = cpu_mesh(2)
    torch.manual_seed(0)
    whole, plain = torch.randn(5, 3), torch.randn(5, 3)
    x = distribute_tensor(whole, mesh, [Shard(0)])
    with pytest.raises(LongmeshError, match="mixes a DTensor with a plain tensor"):
        x + plain
    with implicit_replication():
        torch.testing.assert_close((x + plain).full_tensor(), whole + plain)
        torch.testing.assert_close((plain @ x.t()).full_tensor(), plain @ whole.t())
        with implicit_replication():
            pass
        torch.testing.assert_close((plain * x).full_tensor(), plain * whole)
    with pytest.raises(LongmeshError, match="mixes a DTensor with a plain tensor"):
        x + plain
    return True


def test_implicit_replication(pool):
    """Nested contexts end one by one, and outside a plain tensor is refused again."""
    assert pool.run(replication, ranks=2) == [True] * 2


def replicated_gradient():
    mesh = cpu_mesh(2)
    plain = torch.ones(5, requires_grad=True)
    x = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
    with implicit_replication():
        (x * plain).sum().backward()
    assert isinstance(plain.grad, DTensor)  # as everything that comes out of DTensors
    return plain.grad.full_tensor().tolist()


def test_gradient_of_a_replicated_plain_tensor(pool):
    assert pool.run(replicated_gradient, ranks=2) == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 2
