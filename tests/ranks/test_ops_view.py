"""Views on real ranks against plain torch: values and gradients, random layouts, uneven and empty shards."""

import torch

from longmesh import Replicate, Shard, distribute_tensor
from longmesh.errors import LongmeshError
from longmesh.testing.mesh import cpu_mesh
from support.op_check import compare_op

RESHAPES = [
    ((5, 2), (10,)),
    ((8, 6), (6, 8)),
    ((12,), (4, 3)),
    ((4, 3, 2), (12, 2)),
    ((4, 3, 2), (4, 6)),
    ((1, 6), (6,)),
    ((3, 1, 4), (1, 12)),
    ((2, 0, 3), (0,)),
    ((7,), (1, 7, 1)),
]

VIEWS = {
    "permute": lambda x: x.permute(2, 0, 1),
    "transpose": lambda x: (x.transpose(0, 2), x.mT, x.swapaxes(0, 1), x.movedim(0, 2)),
    "squeeze": lambda x: (x.squeeze(), x.squeeze(1), x.unsqueeze(0), x.unsqueeze(-1)),
    "expand": lambda x: (x.expand(2, -1, -1, -1), x[:1].expand(4, -1, -1), x.broadcast_to(2, *x.shape)),
    "flatten": lambda x: (x.flatten(), x.flatten(0, 1), x.unflatten(2, (2, -1)), x.ravel()),
    "slice": lambda x: (x[1:3], x[:, :, 1::2], x[:, :, 3:], x.narrow(0, 0, 2), x[..., :-1], x[4:2]),
    "select": lambda x: (x[0], x[-1], x[:, 0], x[..., 3], x[1, 0, 2]),
    "split": lambda x: (
        *x.split(2),
        *x.split([1, 2, 3], 2),
        *x.chunk(2, -1),
        *x.tensor_split(3),
        *x.unbind(0),
    ),
    "unfold": lambda x: (x.unfold(0, 2, 1), x.unfold(2, 3, 2)),
    "diagonal": lambda x: (x.diagonal(), x.diagonal(1, 0, 2), torch.diag_embed(x, 1), x[:, 0].diag()),
    "strided": lambda x: x.as_strided((2, 3), (3, 1), 1),
    "flip": lambda x: (
        x.flip(0),
        x.flip((0, 2)),
        x.roll(1, 0),
        x.roll((1, -2), (0, 2)),
        x.roll(3),
        x.rot90(1, (0, 2)),
    ),
    "repeat": lambda x: (x.repeat(2, 1, 1), x.repeat(1, 2, 1, 2), x.tile(2), x.repeat_interleave(2, 0)),
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(x.reshape(-1, 1, 3, 2))),
}


def reshapes(mesh_shape):
    torch.manual_seed(0)
    found = []
    for before, after in RESHAPES:
        found += compare_op(
            lambda x, after=after: x.reshape(after) * 2, [torch.randn(before)], mesh_shape, trials=8
        )
        found += compare_op(
            lambda x, after=after: torch.reshape(x, after), [torch.randn(before)], mesh_shape, trials=3
        )
    return found


def views(mesh_shape, names):
    torch.manual_seed(0)
    found = []
    for name in names:
        for shape in [(5, 1, 6), (2, 3, 6)]:
            found += compare_op(VIEWS[name], [torch.randn(shape)], mesh_shape, trials=4)
    return found


def test_reshapes(pool):
    assert pool.run(reshapes, (3,), ranks=3)[0] == []
    assert pool.run(reshapes, (2, 2), ranks=4)[0] == []


def test_views_on_one_axis(pool):
    assert pool.run(views, (3,), list(VIEWS), ranks=3)[0] == []


def test_views_on_two_axes(pool):
    assert pool.run(views, (2, 2), list(VIEWS), ranks=4)[0] == []


def refusals():
    mesh = cpu_mesh(4, names=("tp",))
    x = distribute_tensor(torch.arange(48.0).view(8, 6), mesh, [Shard(0)], src_data_rank=None)
    y = x.redistribute(placements=[Shard(1)])
    texts = []
    for tensor, size in ((x, (6, 8)), (y, (48,)), (x[:5], (30,))):
        try:
            tensor.view(size)
        except LongmeshError as error:
            texts.append(str(error))
    same = torch.equal(x.reshape(6, 8).full_tensor(), torch.arange(48.0).view(6, 8))
    kept = x.view(48)
    return texts, same, kept.placements, kept._local_tensor.data_ptr() == x._local_tensor.data_ptr()


def test_view_says_which_fix(pool):
    texts, same, placements, shares = pool.run(refusals, ranks=4)[1]
    fix = "; use reshape(), which may redistribute, or redistribute to Replicate() first"
    assert texts == [
        "cannot view (8, 6) as (6, 8): dim 0 is sharded over axis 'tp' (4 ranks) and 6 is not a multiple of it"
        + fix,
        "cannot view (8, 6) as (48,): dim 1 is sharded over axis 'tp' (4 ranks) and it is not the first of the dims "
        "that are merged or split with it" + fix,
        "cannot view (5, 6) as (30,): dim 0 is sharded over axis 'tp' (4 ranks) and 30 is not a multiple of it"
        + fix,
    ]
    assert same and shares
    assert placements == (Shard(0),)


def _written(x, v):
    """In-place writes through views of views, in the middle of a differentiable program."""
    x = x * 1
    x[0] = 5.0
    x[1:3] = v[1:3]
    x[:, 1] += 2
    x[-1].mul_(3)
    x.t()[0, 1:].neg_()
    x.reshape(-1)[2:4].zero_()
    x[1:][1:][0] = v[0]
    x.diagonal().add_(1)
    x[x > 4] = -1.0
    x[torch.tensor([0, 2])] = v[:2]
    return x * 2


def _written_to_pieces(x):
    x.split(2)[1].add_(1)
    x.unbind(1)[0].mul_(2)
    x.chunk(3, 1)[2][1:] = 7.0
    return x


def written(mesh_shape):
    torch.manual_seed(0)
    found = compare_op(_written, [torch.randn(4, 6), torch.randn(4, 6)], mesh_shape, trials=8)
    return found + compare_op(_written_to_pieces, [torch.randn(4, 6)], mesh_shape, trials=4, grad=False)


def test_writes_through_views_reach_the_tensor(pool):
    assert pool.run(written, (3,), ranks=3)[0] == []
    assert pool.run(written, (2, 2), ranks=4)[0] == []


def lost_write():
    mesh = cpu_mesh(2)
    x = distribute_tensor(torch.arange(4.0).view(4, 1), mesh, [Shard(0)], src_data_rank=None)
    try:
        x.unfold(0, 2, 2).zero_()
    except LongmeshError as error:
        return str(error)


def test_a_write_that_would_be_lost_is_refused(pool):
    text = pool.run(lost_write, ranks=2)[0]
    assert text.startswith(
        "can't write in place to this view: aten.unfold.default of a tensor laid out as S(0)"
    )
    assert text.endswith("write to the tensor itself, or redistribute it to Replicate() first")


def views_of_nothing():
    """unbind of a dim of size 0 gives no pieces, and as_strided reads an expanded tensor."""
    mesh, found = cpu_mesh(3), []
    for placement in (Shard(0), Shard(1), Replicate()):
        for shape, dim in (((0, 3), 0), ((3, 0), 1), ((0, 0), 0), ((0, 0), 1)):
            x = distribute_tensor(torch.zeros(shape), mesh, [placement])
            found.append(x.unbind(dim) == () and x.requires_grad_().unbind(dim) == ())
        base = torch.arange(10.0).view(5, 2, 1)
        plain = base.clone().requires_grad_()
        sharded = distribute_tensor(base, mesh, [placement]).requires_grad_()
        for size, stride in (((5, 2, 3), (2, 1, 0)), ((5, 2), (2, 1)), ((4, 2), (1, 1))):
            got, want = (t.expand(5, 2, 4).as_strided(size, stride) for t in (sharded, plain))
            (gradient,) = torch.autograd.grad(got.sin().sum(), sharded)
            (expected,) = torch.autograd.grad(want.sin().sum(), plain)
            found.append(torch.equal(got.full_tensor(), want))
            found.append(torch.allclose(gradient.full_tensor(), expected))
    return found


def test_views_of_nothing(pool):
    for found in pool.run(views_of_nothing, ranks=3):
        assert found == [True] * 30


def strides_of_slices():
    mesh = cpu_mesh(2, 2)
    x = distribute_tensor(torch.zeros(3, 2, 2, 2), mesh, [Shard(0), Shard(0)], src_data_rank=None)
    sliced = x.swapdims(3, 1)[0:]
    weight = distribute_tensor(torch.ones(5, 2), mesh, [Shard(0), Replicate()], src_data_rank=None)
    return sliced.stride(), tuple(torch.nn.functional.linear(sliced, weight).full_tensor().shape)


def test_strides_are_the_same_on_ranks_with_empty_parts(pool):
    """torch asks them which way to go through an op: a rank that goes alone sends other sizes than the rest expect."""
    assert pool.run(strides_of_slices, ranks=4) == [((8, 1, 2, 4), (3, 2, 2, 5))] * 4


def strided_gaps():
    x = distribute_tensor(torch.arange(12.0).view(6, 2), cpu_mesh(2), [Shard(0)])
    try:
        x[::2].as_strided((2, 2), (2, 1))
    except LongmeshError as error:
        return str(error), x[::2].contiguous().as_strided((2, 2), (2, 1)).full_tensor().tolist()
    return "", []


def test_as_strided_does_not_read_between_the_rows_of_a_view(pool):
    for text, found in pool.run(strided_gaps, ranks=2):
        assert text.startswith("as_strided of a view with gaps, of shape (3, 2) and stride (4, 1)")
        assert found == [[0.0, 1.0], [4.0, 5.0]]
