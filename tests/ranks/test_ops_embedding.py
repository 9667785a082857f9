"""Lookups in cut tables on real ranks: pending masks, gradients, padding, norms, bags."""

import copy
import gc
import pickle
import weakref

import torch
import torch.distributed as dist

from longmesh import Replicate, Shard, distribute_tensor
from longmesh.comm import record_comm
from longmesh.spec import MaskPartial, Partial
from longmesh.tensor.mask_buffer import MaskBuffer
from longmesh.testing.mesh import cpu_mesh
from support.op_check import compare_op

F = torch.nn.functional

LOOKUPS = {
    "plain": lambda w, i: F.embedding(i, w),
    "square": lambda w, i: F.embedding(i, w).square(),
    "two pending": lambda w, i: F.embedding(i, w) * F.embedding(i.flip(0), w).tanh(),
    "added": lambda w, i: F.embedding(i, w) + F.embedding(i * 0, w),
    "padding": lambda w, i: F.embedding(i, w, padding_idx=1),
    "negative padding": lambda w, i: F.embedding(i, w, padding_idx=-1),
    "frequency": lambda w, i: F.embedding(i, w, scale_grad_by_freq=True),
    "sliced": lambda w, i: F.embedding(i, w)[1:, ..., :2],
    "reshaped": lambda w, i: F.embedding(i, w).reshape(-1),
    "sum": lambda w, i: F.embedding(i, w).square().sum(),
}

BAGS = {
    mode: lambda w, i, mode=mode: (
        F.embedding_bag(i, w, mode=mode),
        F.embedding_bag(i.reshape(-1), w, torch.tensor([0, 2, 2, 5]), mode=mode),
    )
    for mode in ("sum", "mean", "max")
}


def compare(mesh_shape, programs, rows):
    torch.manual_seed(0)
    found = []
    for name in programs:
        fn = LOOKUPS.get(name) or BAGS[name]
        for size in rows:
            w, i = torch.randn(size, 3), torch.randint(size, (4, 2))
            found += [f"{name}: {t}" for t in compare_op(fn, [w, i], mesh_shape, trials=4)]
            cut = [Shard(0), *[Replicate()] * (len(mesh_shape) - 1)]
            found += [
                f"{name}: {t}"
                for t in compare_op(fn, [w, i], mesh_shape, [cut, [Replicate()] * len(mesh_shape)])
            ]
    return found


def test_lookups(pool):
    assert pool.run(compare, (3,), list(LOOKUPS), (7, 2), ranks=3)[0] == []
    assert pool.run(compare, (2, 2), list(LOOKUPS), (9, 2), ranks=4)[0] == []


def one_row(mesh_shape):
    """One rank has the whole table and masks nothing; all ranks must agree that the result is pending."""
    torch.manual_seed(0)
    w, i = torch.randn(1, 3), torch.zeros(4, dtype=torch.int64)
    programs = [LOOKUPS["plain"], LOOKUPS["square"], lambda w, i: w.index_select(0, i), lambda w, i: w[i]]
    places = [[Replicate(), Shard(0)][: len(mesh_shape)], [Shard(0), Shard(0)][: len(mesh_shape)]]
    whole = [Replicate()] * len(mesh_shape)
    return [
        text
        for fn in programs
        for cut in places
        for text in compare_op(fn, [w, i], mesh_shape, [cut[-len(mesh_shape) :], whole])
    ]


def test_a_table_of_one_row(pool):
    assert pool.run(one_row, (2, 2), ranks=4, timeout=20.0) == [[]] * 4
    assert pool.run(one_row, (3,), ranks=3, timeout=20.0) == [[]] * 3


def test_bags(pool):
    assert pool.run(compare, (3,), list(BAGS), (7,), ranks=3)[0] == []
    assert pool.run(compare, (2, 2), list(BAGS), (7,), ranks=4)[0] == []


class Watch:
    """Notes every use of a MaskBuffer while it is entered."""

    def __enter__(self):
        self.uses, self.plain = [], {}
        for name in ("materialize_mask", "apply_mask", "release_mask"):
            self.plain[name] = getattr(MaskBuffer, name)
            setattr(MaskBuffer, name, self._noting(name, self.plain[name]))
        return self.uses

    def _noting(self, name, plain):
        def use(buffer, *args):
            self.uses.append(name.removesuffix("_mask"))
            return plain(buffer, *args)

        return use

    def __exit__(self, *_):
        for name, plain in self.plain.items():
            setattr(MaskBuffer, name, plain)


def life_of_a_mask():
    mesh = cpu_mesh(4)
    table = torch.arange(18.0).view(9, 2)
    w = distribute_tensor(table, mesh, [Shard(0)], src_data_rank=None)
    index = torch.tensor([0, 4, 8])
    with Watch() as uses:
        y = F.embedding(index, w)
        pending = y.placements
        copies = [y.detach(), y.clone()]
        kinds = [c.placements for c in copies]
        used = list(uses)
        whole = y.full_tensor()
        after = uses[len(used) :]
        again = y.full_tensor()
        later = y.placements
        copied = [c.full_tensor() for c in copies]
    right = all(torch.equal(t, table[index]) for t in (whole, again, *copied))
    dropped = F.embedding(index, w)
    buffer = dropped._lookup.buffer
    memory = weakref.ref(buffer.data)
    del dropped
    gc.collect()
    return pending, kinds, used, after, later, right, memory() is None, buffer.refcount, len(uses)


def test_the_mask_lives_until_the_sum(pool):
    for result in pool.run(life_of_a_mask, ranks=4):
        pending, kinds, used, after, later, right, freed, count, total = result
        assert pending == (MaskPartial(),) and kinds == [(MaskPartial(),)] * 2
        assert used == ["materialize"] * 3
        assert after == ["apply", "release"]
        assert later == (Partial(),)
        assert right and freed and count == 0
        assert total == 3 + 2 + 1 + 2


def uses_of_a_pending_lookup():
    """Whatever is done with a pending lookup sees its value: parts, copies, files, in-place ops."""
    mesh = cpu_mesh(2)
    table = torch.arange(1.0, 7).view(3, 2)
    w = distribute_tensor(table, mesh, [Shard(0)], src_data_rank=None)
    index = torch.tensor([0, 2, 2])
    first = dist.get_rank() == 0
    results = [
        torch.equal(
            F.embedding(index, w).to_local(), table[index] * torch.tensor([[first], [not first], [not first]])
        )
    ]
    copies = (copy.deepcopy, lambda y: pickle.loads(pickle.dumps(y)), torch.Tensor.clone)
    for make in copies:
        y = F.embedding(index, w)
        z = make(y)
        results += [torch.equal(z.full_tensor(), table[index]), torch.equal(y.full_tensor(), table[index])]
    for write in (torch.Tensor.zero_, lambda y: y.mul_(2), lambda y: y.fill_(3), lambda y: y[0].fill_(9)):
        y, plain = F.embedding(index, w), table[index]
        write(y), write(plain)
        results.append(torch.equal(y.full_tensor(), plain))
    return results


def writes_through_aliases():
    """An alias of a pending lookup is written to, before and after others are made: all aliases see it, clones not."""
    mesh = cpu_mesh(2)
    table = torch.arange(1.0, 7).view(3, 2)
    index = torch.tensor([[0, 2], [2, 1]])
    found = []
    for given in (table, distribute_tensor(table, mesh, [Shard(0)], src_data_rank=None)):
        e = F.embedding(index, given)
        first, copied = e.detach(), e.clone()
        first.add_(0.25)
        e.view(-1)[0] = 7
        late = e.data.detach()
        copied.detach().mul_(2)
        e.detach().clone().zero_()
        late.sub_(1)
        found.append([first, e, late, copied, e.detach() * 2])
    return [torch.equal(a, b.full_tensor()) for a, b in zip(*found, strict=True)]


def test_aliases_of_a_pending_lookup_share_writes(pool):
    assert pool.run(writes_through_aliases, ranks=2) == [[True] * 5] * 2


def test_anything_may_be_done_with_a_pending_lookup(pool):
    assert all(all(results) for results in pool.run(uses_of_a_pending_lookup, ranks=2))


def gradient_of_a_row_cut_table():
    mesh = cpu_mesh(4)
    torch.manual_seed(0)
    table = torch.randn(9, 2)
    index = torch.randint(9, (5,))
    results = []
    for given in (index, distribute_tensor(index, mesh, [Replicate()], src_data_rank=None)):
        w = distribute_tensor(table, mesh, [Shard(0)], src_data_rank=None).requires_grad_()
        plain = table.clone().requires_grad_()
        out = F.embedding(given, w)
        loss = out.redistribute(placements=[Replicate()]).square().sum()
        F.embedding(index, plain).square().sum().backward()
        with record_comm() as log:
            loss.backward()
        same = torch.allclose(w.grad.full_tensor(), plain.grad)
        results.append((w.grad.placements, tuple(w.grad.to_local().shape)[1:], len(log.events), same))
    return results


def test_the_gradient_of_a_row_cut_table_is_cut_and_sends_nothing(pool):
    assert pool.run(gradient_of_a_row_cut_table, ranks=4)[3] == [((Shard(0),), (2,), 0, True)] * 2


def renormed(layout):
    mesh = cpu_mesh(3)
    torch.manual_seed(0)
    table, index = torch.randn(7, 4) * 3, torch.tensor([0, 3, 3, 6])
    w = distribute_tensor(table.clone(), mesh, [layout], src_data_rank=None)
    plain = table.clone()
    got = F.embedding(index, w, max_norm=1.0).full_tensor()
    want = F.embedding(index, plain, max_norm=1.0)
    return torch.allclose(got, want), torch.allclose(w.full_tensor(), plain), w.placements == (layout,)


def test_max_norm(pool):
    for layout in (Shard(0), Shard(1), Replicate()):
        assert pool.run(renormed, layout, ranks=3)[2] == (True, True, True)


def module_on_two_axes():
    """nn.Embedding cut by rows and by columns, a batch cut by the other axis: gradients as in one process."""
    mesh = cpu_mesh(2, 2)
    torch.manual_seed(0)
    plain = torch.nn.Embedding(5, 4, padding_idx=2)
    index = torch.randint(5, (3, 2))
    plain(index).tanh().sum().backward()
    results = []
    for table in (
        [Shard(0), Replicate()],
        [Shard(0), Shard(1)],
        [Shard(0), Shard(0)],
        [Replicate(), Shard(1)],
    ):
        for batch in ([Replicate(), Shard(0)], [Shard(0), Replicate()], [Replicate(), Replicate()]):
            module = torch.nn.Embedding(5, 4, padding_idx=2)
            weight = distribute_tensor(plain.weight.detach(), mesh, table, src_data_rank=None)
            module.weight = torch.nn.Parameter(weight)
            module(distribute_tensor(index, mesh, batch, src_data_rank=None)).tanh().sum().backward()
            grad = module.weight.grad
            results.append(torch.allclose(grad.full_tensor(), plain.weight.grad, atol=1e-6))
            if table[0] == Shard(0):
                results.append(grad.placements[0] == Shard(0))
    return results


def test_modules_on_two_axes(pool):
    assert all(pool.run(module_on_two_axes, ranks=4)[0])


def sparse_gradients():
    """The gradient of a lookup with sparse=True: values as plain torch's, dense, laid out as the table."""
    table, indices = (
        torch.randn(7, 4, generator=torch.Generator().manual_seed(0)),
        torch.tensor([[1, 2, 6], [6, 0, 1]]),
    )
    mesh, found = cpu_mesh(3), []
    for padding, options in ((None, {}), (2, {"padding_idx": 2})):
        plain = table.clone().requires_grad_()
        F.embedding(indices, plain, sparse=True, **options).sin().sum().backward()
        for placement in (Shard(0), Shard(1), Replicate()):
            for index_placement in (Shard(0), Shard(1), Replicate()):
                sharded = distribute_tensor(table, mesh, [placement]).requires_grad_()
                given = distribute_tensor(indices, mesh, [index_placement])
                F.embedding(given, sharded, sparse=True, **options).sin().sum().backward()
                error = (sharded.grad.full_tensor() - plain.grad.to_dense()).abs().max().item()
                found.append((padding, placement, index_placement, error, sharded.grad.placements))
    return found


def test_sparse_gradients(pool):
    for found in pool.run(sparse_gradients, ranks=3):
        assert len(found) == 18
        assert [case for case in found if not case[3] < 1e-6] == []
        assert {case[4] for case in found if case[1] == Shard(0)} == {(Shard(0),)}
