"""Views along sharded dims: read and written through the tensor that they are views of."""

import copy
import pickle

import pytest
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from longmesh import DTensor, Partial, Replicate, Shard, capture, distribute_tensor
from longmesh.checkpoint import load, save
from longmesh.comm import record_comm
from longmesh.debug import explain, strict
from longmesh.errors import LongmeshError
from longmesh.parallel import ColwiseParallel, parallelize_module
from longmesh.testing import cpu_mesh


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def add_to_a_row(x, y):
    x[0] += y.sum(0)
    return x


def row_read_after_a_write(x, y):
    row = x[0]
    row.add_(1)
    return row, x


def write_through_several_views(x, y):
    x[0:1, 1, None, :].mul_(2)
    return x


def write_to_the_base_first(x, y):
    h = x[:2]
    x.mul_(3)
    h.add_(1)
    return h, x


def read_after_the_base(x, y):
    h, row = x[1:3], x[-1]
    x.add_(y)
    return h, row, h * 2, row + h


def view_of_a_view(x, y):
    h = x[1:]
    k = h[0]
    x.mul_(2)
    k.add_(1)
    h.sub_(y[1:])
    return x, h, k


def two_views(x, y):
    a, b = x[:3], x[1:]
    a.mul_(2)
    b.add_(1)
    a.add_(b[:1].clone())
    return x, a, b


def pieces(x, y):
    first, second = x.split([1, x.shape[0] - 1])
    first.fill_(7)
    second.mul_(2)
    x.unbind(0)[1].add_(5)
    return x, first, second


def flattened(x, y):
    flat, copied = x.reshape(-1), x.transpose(0, 1).reshape(-1)  # the second is a copy in plain torch, too
    x[0] = 3
    flat[1:3].neg_()
    return x, x.transpose(0, 1)[:, 1], flat, copied


def other_views(x, y):
    held = [
        x.diagonal(), x.narrow(0, 1, 2), x.select(0, -1), x.unbind(1)[0], x.chunk(2)[1], x.expand(2, *x.shape),
        x.movedim(0, -1)[..., 1:], x[::2], x[1:2, None], x[-1:].squeeze(0), x[0].unsqueeze(0), x[1:].reshape(-1),
        x[:, 1:][1:],
    ]  # fmt: skip
    x.mul_(y)
    held[1].add_(1)
    return x, *held, *[h * 2 for h in held]


def shapes_changed_in_place(x, y):
    row, base = x[1], x.clone()
    row.unsqueeze_(0)
    held = base[1:]
    base.transpose_(0, 1)
    base.mul_(2)
    row.add_(y[1])
    x.mul_(3)
    return x, row, base, held


def detached(x, y):
    h, data = x[:2], x.data
    d = h.detach()
    data.mul_(2)
    d.add_(1)
    x.detach()[0] = 5
    return x, h, d, data, h.data + d


def copied(x, y):
    view, alias = x[:, 1:], copy.copy(x)
    alias[1].mul_(3)
    copy.copy(alias)[:, 1].add_(1)
    return x, view, alias


def same_layout(x, y):
    again = x.redistribute(placements=x.placements) if isinstance(x, DTensor) else x
    h = x[:2]
    again.mul_(2)
    return x, h, again


def copies(x, y):
    h = x[:2]
    x.add_(1)
    cloned, copied = h.clone(), copy.deepcopy(h)
    x.mul_(2)
    copied.add_(1)
    return x, h, cloned, copied


def foreach(x, y):
    a, b, held = x[:1], x[1:], x[-1:]
    torch._foreach_mul_([x, y], 0.5)
    torch._foreach_mul_([a, b], [y[:1], y[1:]])
    return x, a, b, held


def made_contiguous(x, y):
    """A view that is not contiguous is copied by contiguous() and reshape(), one that is, is not."""
    views = [x[::2], x[1:], x.movedim(0, -1)[..., 1:], x[:, ::2], x.transpose(0, 1)[1:], x[::2].unsqueeze(0)]
    made = [v.contiguous() for v in views] + [v.reshape(-1) for v in views]
    strides = [n for v in views for n in v.stride()]
    x.mul_(2)
    made[0].add_(1)
    made[6].add_(1)
    return x, *views, *made, *strides


PROGRAMS = [
    add_to_a_row, row_read_after_a_write, write_through_several_views, write_to_the_base_first, read_after_the_base,
    view_of_a_view, two_views, pieces, flattened, foreach, other_views, shapes_changed_in_place, detached, copied,
    same_layout, copies, made_contiguous,
]  # fmt: skip


def run(shape, ranks, mesh_shape):
    mesh = cpu_mesh(*mesh_shape)
    wrong = []
    for program in PROGRAMS:
        for placement in (Shard(0), Shard(1), Replicate()):
            for inference in (False, True):
                with torch.inference_mode(inference), torch.no_grad():
                    torch.manual_seed(0)
                    x, y = torch.randn(shape), torch.randn(shape)
                    placements = [placement] * len(mesh_shape)
                    parts = [distribute_tensor(t.clone(), mesh, placements) for t in (x, y)]
                    expected, found = program(x, y), program(*parts)
                    expected = expected if isinstance(expected, tuple) else (expected,)
                    found = found if isinstance(found, tuple) else (found,)
                    for number, (a, b) in enumerate(zip(expected, found, strict=True)):
                        same = a == b if isinstance(a, int) else torch.allclose(a, whole(b), atol=1e-6)
                        if not same:
                            wrong.append(f"{program.__name__} {placement} {number} {inference}")
    return wrong


@pytest.mark.parametrize(("shape", "mesh_shape"), [((4, 3, 2), (2,)), ((5, 2, 3), (3,)), ((3, 2, 2), (2, 2))])
def test_programs(pool, shape, mesh_shape):
    ranks = 4 if len(mesh_shape) == 2 else mesh_shape[0]
    assert pool.run(run, shape, ranks, mesh_shape, ranks=ranks) == [[]] * ranks


def gradients_through_writes():
    """A row is written in a graph: the gradient of what was there is gone."""
    mesh = cpu_mesh(2)
    base, value = torch.randn(3, 2), torch.randn(2)
    grads = []
    for x, v in ((base, value), [distribute_tensor(t, mesh, [Shard(0)]) for t in (base, value)]):
        x, v = x.clone().requires_grad_(), v.clone().requires_grad_()
        y = x * 2
        y[1] = v * 3
        (y.pow(2)).sum().backward()
        grads.append([whole(x.grad), whole(v.grad)])
    return [torch.allclose(a, b) for a, b in zip(*grads, strict=True)]


def test_gradients(pool):
    assert pool.run(gradients_through_writes, ranks=2) == [[True, True]] * 2


def assigned_data():
    mesh = cpu_mesh(2)
    p = torch.nn.Parameter(distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [Shard(0)]))
    p.data = p.data * 2
    once = whole(p.detach())
    layers = [torch.nn.Parameter(distribute_tensor(torch.ones(n), mesh, [Replicate()])) for n in (3, 2)]
    vector_to_parameters(parameters_to_vector(layers) * 5, layers)
    p.data = distribute_tensor(torch.ones(4, 2), mesh, [Shard(1)])
    try:
        p.data = torch.ones(4, 2)
    except LongmeshError as error:
        text = str(error)
    return once.sum().item(), [whole(q.detach()).tolist() for q in layers], tuple(p.shape), p.placements, text


def test_data_is_replaced(pool):
    for once, layers, shape, placements, text in pool.run(assigned_data, ranks=2):
        assert once == 30.0
        assert layers == [[5.0] * 3, [5.0] * 2]
        assert shape == (4, 2) and placements == (Shard(1),)
        assert "the data of a DTensor is a DTensor, got a Tensor of shape (4, 2); use copy_()" in text


def text_of(call):
    try:
        return f"no error: {call()}"
    except LongmeshError as error:
        return str(error)


def outdated(folder):
    """Where nothing may be sent, a view whose base was written to is refused; where something may, it is read again."""
    mesh = cpu_mesh(2)
    x = distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [Shard(0)])
    h = x[1:]
    assert "outdated" not in repr(h)
    local = h.to_local().clone()
    x.mul_(2)
    refused = [text_of(h.to_local), text_of(lambda: pickle.dumps(h)), text_of(lambda: save({"h": h}, folder))]
    shown = repr(h)
    h.redistribute(placements=[Replicate()])
    loaded = text_of(lambda: load({"h": h}, folder))
    return refused, "outdated=True" in shown, torch.equal(h.to_local(), local * 2), loaded


def test_views_that_would_have_to_be_read_again(pool, tmp_path):
    for refused, is_shown, is_read, loaded in pool.run(outdated, str(tmp_path / "point"), ranks=2):
        for text in refused:
            assert (
                "the tensor of shape (2, 2) is a view along a sharded dim: its local tensor is a copy" in text
            )
            assert text.rstrip().endswith("call clone() or redistribute() on it first, on every rank")
        assert is_shown and is_read
        assert "no checkpoint" in loaded or "view along a sharded dim" in loaded


def writes_beside_ops(folder):
    """Loads, captured steps and optimizers write, and views that are held see it; module styles read them."""
    mesh = cpu_mesh(2)
    found = {}
    x = distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [Shard(0)])
    save({"x": x}, folder)
    h = x[1:]
    x.zero_()
    load({"x": x}, folder)
    found["load"] = whole(h + 0).tolist() == [[2.0, 3.0], [4.0, 5.0]]
    found["load of a view"] = text_of(lambda: load({"x": x[:]}, folder)).startswith("no error")
    found["load into a copy"] = text_of(lambda: load({"x": torch.cat([x, x])[:3]}, folder)).endswith(
        "'x' is a view along a sharded dim, a copy: load into the tensor that it is a view of"
    )

    @capture
    def double(t):
        with torch.no_grad():
            t.mul_(2)
        return t.sum()

    double(x), double(x)
    found["capture"] = whole(h + 0).tolist() == [[8.0, 12.0], [16.0, 20.0]]
    p = torch.nn.Parameter(distribute_tensor(torch.ones(3, 2), mesh, [Shard(0)]))
    held = p[1:]
    step = torch.optim.AdamW([p], lr=0.1)
    for _ in range(2):
        p.sum().backward()
        step.step()
    found["optimizer"] = torch.equal(whole(held * 1).detach(), whole(p).detach()[1:])
    linear = parallelize_module(torch.nn.Linear(2, 4), mesh, ColwiseParallel(input_layouts=Shard(0)))
    with torch.no_grad():
        late = x[1:]
        x.add_(1)
        found["style"] = torch.equal(linear(late), linear(x[1:].clone()))
    return found


def test_writes_beside_ops(pool, tmp_path):
    for found in pool.run(writes_beside_ops, str(tmp_path / "point"), ranks=2):
        assert {name: value for name, value in found.items() if value is not True} == {}


def inference():
    """Views in inference mode of tensors from outside it count their writes together."""
    mesh = cpu_mesh(2)
    x = distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [Shard(0)])
    with torch.inference_mode():
        row, turned, y = x[0], x.t(), x * 1
        x.mul_(2)
        flat, last = y.reshape(-1), y[-1]
        y.t().add_(1)
        return [whole(t).tolist() for t in (row, turned + 0, flat, last)]


def conjugates(placement):
    """What is written to a conjugate and its imaginary part, and to the tensor after they were taken."""
    mesh = cpu_mesh(3)
    whole = torch.arange(10).view(5, 2) + 1j * torch.arange(10, 20).view(5, 2)
    results = []
    for z in (distribute_tensor(whole.clone(), mesh, [placement]), whole.clone()):
        conjugate, imaginary = z.conj(), z.conj().imag
        conjugate.mul_(2 + 1j)
        z.add_(1)
        imaginary.sub_(3)
        results.append((z, conjugate, imaginary, (conjugate * z).sum()))
    return [(a.full_tensor(), b) for a, b in zip(*results, strict=True)]


@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_conjugates_are_views(pool, placement):
    for pairs in pool.run(conjugates, placement, ranks=3):
        for found, wanted in pairs:
            torch.testing.assert_close(found.resolve_conj(), wanted.resolve_conj().resolve_neg())


def test_inference_mode(pool):
    expected = [[0.0, 2.0], [[0.0, 4.0, 8.0], [2.0, 6.0, 10.0]], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [5.0, 6.0]]
    assert pool.run(inference, ranks=2) == [expected] * 2


def planned_bytes():
    """What reading a view again and writing to its base send is in plans, of ops that run one by one."""
    mesh = cpu_mesh(2)
    x = distribute_tensor(torch.randn(5, 3), mesh, [Shard(0)])
    h = x[2:]
    x.mul_(2)
    with record_comm() as log:
        told = explain(lambda: (h.add_(1), h * 2))
    y = x[2:]
    x.mul_(2)
    with strict():
        refused = text_of(lambda: y + 1)
    return (
        sum(op.sent_bytes for op in told.ops),
        log.total_bytes,
        refused,
        torch.equal(whole(y), whole(x)[2:]),
    )


def test_bytes_are_in_plans(pool):
    results = pool.run(planned_bytes, ranks=2)
    assert sum(planned for planned, *_ in results) > 0
    for planned, sent, refused, is_right in results:
        assert planned == sent
        assert refused.startswith("strict(): aten.slice.Tensor of (5, 3) S(0) would send")
        assert is_right


def written_expanded(shape, mesh_shape):
    """How writes to expanded tensors end: as in plain torch, on every rank; of pending sums all are refused."""
    mesh, found = cpu_mesh(*mesh_shape), []
    writes = {
        "fill": lambda x: x.expand(2, *x.shape).fill_(3.0),
        "zero": lambda x: x.expand(2, *x.shape).zero_(),
        "add": lambda x: x.expand(2, *x.shape).add_(1),
        "copy": lambda x: x.expand(2, *x.shape).copy_(x.detach().clone()),
        "lists": lambda x: torch._foreach_mul_([x.expand(2, *x.shape)], 2.0),
    }
    for placement in (Shard(0), Shard(1), Replicate(), Partial()):
        for name, write in writes.items():
            plain = torch.arange(float(torch.Size(shape).numel())).view(shape)
            x = distribute_tensor(plain.clone(), mesh, [placement] * mesh.ndim)
            ended = []
            for tensor in (plain, x):
                try:
                    write(tensor)
                    ended.append("")
                except (RuntimeError, LongmeshError) as error:
                    ended.append(str(error))
            is_told = "several of its elements are one place in memory; clone() it first" in ended[1]
            if is_told and placement == Partial():
                continue  # fill_ and zero_, too
            if bool(ended[0]) != is_told or not torch.equal(plain, x.full_tensor()):
                found.append((name, str(placement), ended))
    return found


@pytest.mark.parametrize(("shape", "mesh_shape"), [((4, 3, 2), (2,)), ((1, 1, 2), (2,)), ((3, 2, 2), (2, 2))])
def test_writes_to_expanded_tensors_end_alike_on_every_rank(pool, shape, mesh_shape):
    for found in pool.run(written_expanded, shape, mesh_shape, ranks=torch.Size(mesh_shape).numel()):
        assert found == []


def reshaped_base():
    """A base that would get another shape in place: autograd replays views on what the base is then. One rank alone has
    a view of it, as a log would."""
    mesh = cpu_mesh(2)
    errors, views = [], []
    for reshape in (lambda t: t.t_(), lambda t: t.unsqueeze_(0)):
        x = distribute_tensor(torch.ones(3, 3), mesh, [Shard(1)]).requires_grad_()
        base = x * 2
        if mesh.get_local_rank() == 0:
            views.append(base[0])
        with pytest.raises(LongmeshError) as raised:
            reshape(base)
        errors.append(str(raised.value))
        view = base[:2]
        reshape(view)  # the view itself may get another shape
        (view[0] * distribute_tensor(torch.arange(3.0)[: view.shape[-1]], mesh)).sum().backward()
        expected = torch.ones(3, 3).requires_grad_()
        plain = (expected * 2)[:2]
        reshape(plain)
        (plain[0] * torch.arange(3.0)[: plain.shape[-1]]).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), expected.grad)
    with torch.no_grad():
        assert reshape(x * 2).shape == (1, 3, 3)
    return errors


def test_a_base_that_needs_a_gradient_keeps_its_shape(pool):
    for first, second in pool.run(reshaped_base, ranks=2):
        assert first == (
            "t_() of a DTensor of shape (3, 3) that needs a gradient: autograd would take its views, and what it saved "
            "of it for a backward, as those of the new shape; use t(), which returns a new tensor"
        )
        assert second.startswith("unsqueeze_() of a DTensor of shape (3, 3) ")
