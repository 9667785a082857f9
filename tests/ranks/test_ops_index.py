"""Reading and writing by position on real ranks against plain torch: values and gradients, random layouts."""

import torch

from longmesh import Replicate, Shard, distribute_tensor
from longmesh.comm import record_comm
from longmesh.testing.mesh import cpu_mesh
from support.op_check import compare_op

F = torch.nn.functional
at = torch.tensor

READS = {
    "index": lambda x, i: (x[i], x[:, i % 4], x[i, i % 4], x[i[:, None], at([0, 3])]),
    "index_apart": lambda x, i: (x.unsqueeze(1).expand(-1, 2, -1)[i, :, i % 4], x[at([-1, 0])]),
    "masks": lambda x, i: (
        x[x > 0],
        x[(x > 0)[:, 0]],
        x.masked_select(x > 0),
        torch.where(x > 0)[0],
        x[x[:, 0] > 9],
    ),
    "nonzero": lambda x, i: (
        (x > 0).nonzero(),
        torch.argwhere(i > 1),
        i.unique(),
        torch.unique(i, return_counts=True),
    ),
    "index_select": lambda x, i: (
        x.index_select(0, i),
        x.index_select(1, i % 4).square(),
        x.index_select(0, at([0])),
    ),
    "gather": lambda x, i: (
        x.gather(0, x.argsort(0)),
        x.gather(0, i.view(-1, 1)),
        x.gather(1, x.argsort(1)).square(),
    ),
    "take": lambda x, i: (x.take(i), torch.take_along_dim(x, x.argsort(0), 0), torch.take_along_dim(x, i)),
    "triangles": lambda x, i: (x.tril(), x.triu(1), x.tril(-2).square(), x.T.triu(-1)),
    "pads": lambda x, i: (
        F.pad(x, (1, 2)),
        F.pad(x, (0, 0, 1, 3), value=2.0),
        F.pad(x, (-1, 1, 2, -1)),
        F.pad(i, (1, 1)),
    ),
    "edge_pads": lambda x, i: (
        F.pad(x, (1, 1), mode="reflect"),
        F.pad(x[None], (1, 1, 2, 0), mode="replicate"),
    ),
    "cat": lambda x, i: (torch.cat([x, x * 2, x[:3]]), torch.cat([x, x], 1), torch.cat([x, x[:0], x[:1]])),
    "stack": lambda x, i: (
        torch.stack([x, x * 2], 1),
        torch.hstack([x, x]),
        torch.vstack([x, x[0]]),
        torch.dstack([x, x]),
    ),
    "shapes": lambda x, i: (
        torch.block_diag(x[:2], x[:1]),
        *torch.meshgrid(x[:, 0], x[0], indexing="ij"),
        F.one_hot(i, 9),
    ),
}

WRITES = {
    "scatter": lambda x, i, v: (
        x.scatter(0, x.argsort(0), x * 2),
        x.scatter(0, i[:2].view(-1, 1), 5.0),
        x.scatter(1, x.argsort(1)[:, :2], x[:, 1:3]),
    ),
    "scatter_add": lambda x, i, v: (
        x.scatter_add(0, i[:, None].expand(-1, 4), v),
        x.scatter_add(1, x.argsort(1), x),
    ),
    "scatter_reduce": lambda x, i, v: (
        x.scatter_reduce(0, i[:, None].expand(-1, 4), v, "amax"),
        x.scatter_reduce(0, i[:, None].expand(-1, 4), v, "mean", include_self=False),
    ),
    "index_add": lambda x, i, v: (x.index_add(0, i, v, alpha=2), x.index_add(1, at([1, 1]), x[:, :2])),
    "index_copy": lambda x, i, v: (x.index_copy(0, at([0, 1]), v[:2]), x.index_fill(1, at([2, 0]), 7.0)),
    "index_put": lambda x, i, v: (
        torch.index_put(x, (i,), v, accumulate=True),
        torch.index_put(x, (at([0, 1]), at([-1, 0])), v[0, :2]),
        torch.index_put(x, (x > 0,), v[0, 0]),
        torch.index_put(x, (x[:, 0] > 0,), v[0]),
    ),
    "views": lambda x, i, v: (
        x.slice_scatter(v[:2], 0, 0, 2),
        x.slice_scatter(x[:, :2], 1, 0, 4, 2),
        x.select_scatter(v[0], 0, -1),
        x.select_scatter(x[:, 0], 1, 1),
        torch.diagonal_scatter(x, x.new_ones(min(x.shape))),
    ),
    "masked_scatter": lambda x, i, v: (
        x.masked_scatter(x > 1, x.reshape(-1)),
        torch.put(x, i, v[:, 0], accumulate=True),
    ),
}


def reads(mesh_shape, names):
    torch.manual_seed(0)
    found = []
    for name in names:
        for rows in (9, 2):
            x, i = torch.randn(rows, 4), torch.randint(rows, (5,))
            found += [f"{name}: {t}" for t in compare_op(READS[name], [x, i], mesh_shape, trials=2)]
    return found


def writes(mesh_shape, names):
    torch.manual_seed(0)
    found = []
    for name in names:
        for rows in (9, 2):
            x, i, v = torch.randn(rows, 4), torch.randint(rows, (5,)), torch.randn(5, 4)
            found += [f"{name}: {t}" for t in compare_op(WRITES[name], [x, i, v], mesh_shape, trials=2)]
    return found


def test_reads(pool):
    assert pool.run(reads, (3,), list(READS), ranks=3)[0] == []
    assert pool.run(reads, (2, 2), list(READS), ranks=4)[0] == []


def test_writes(pool):
    assert pool.run(writes, (3,), list(WRITES), ranks=3)[0] == []
    assert pool.run(writes, (2, 2), list(WRITES), ranks=4)[0] == []


def out_of_range():
    """One bad index: every rank raises, and the next op works."""
    mesh = cpu_mesh(3)
    x = distribute_tensor(torch.randn(7, 2), mesh, [Shard(0)], src_data_rank=None)
    bad = distribute_tensor(torch.tensor([1, 7]), mesh, [Replicate()], src_data_rank=None)
    texts = []
    for fn in (
        lambda: x[bad],
        lambda: x.index_select(0, bad),
        lambda: F.embedding(bad, x),
        lambda: x.index_add(0, bad, x[:2]),
    ):
        try:
            fn()
        except IndexError as error:
            texts.append(str(error))
    return texts, torch.equal(x[:2].full_tensor(), x.full_tensor()[:2])


def test_an_index_out_of_range(pool):
    for texts, works in pool.run(out_of_range, ranks=3):
        assert texts == ["index 7 is out of bounds for dimension 0 with size 7"] * 4
        assert works


def bytes_of_a_slice():
    """A slice of a cut dim moves the rows that change hands, not the tensor."""
    mesh = cpu_mesh(4)
    x = distribute_tensor(torch.arange(16.0).view(16, 1), mesh, [Shard(0)], src_data_rank=None)
    with record_comm() as log:
        y = x[4:12]
    whole = y.full_tensor().flatten().tolist()
    with record_comm() as even:
        _ = x.view(32 // 2)
    return [(e.kind, e.sent_bytes) for e in log.events], y.placements, whole, len(even.events)


def test_a_slice_moves_only_what_changes_hands(pool):
    results = pool.run(bytes_of_a_slice, ranks=4)
    assert [events for events, *_ in results] == [
        [("all_to_all", 0)], [("all_to_all", 8)], [("all_to_all", 8)], [("all_to_all", 0)]
    ]  # fmt: skip
    assert results[0][1:] == ((Shard(0),), list(map(float, range(4, 12))), 0)


def written_by_index_where_one_rank_has_all():
    """A dim of size 1: one rank has all of it, and could write in place what the other can't."""
    x = distribute_tensor(torch.ones(3, 1), cpu_mesh(2), [Shard(1)])
    x[:, [0]] *= 2
    return x.full_tensor().tolist()


def test_written_by_index_where_one_rank_has_all(pool):
    assert pool.run(written_by_index_where_one_rank_has_all, ranks=2) == [[[2.0]] * 3] * 2
