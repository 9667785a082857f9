"""DTensor made, moved, saved: the public API on real ranks."""

import copy
import io
import itertools
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import longmesh
from longmesh import DTensor, Layout, Partial, Replicate, Shard, distribute_module, distribute_tensor
from longmesh.comm import comm_of, record_comm
from longmesh.errors import LongmeshError, NotDistributedError
from longmesh.parallel import ColwiseParallel, loss_parallel, parallelize_module
from longmesh.tensor.tensor_layout import tensor_layout
from longmesh.testing import RankError, cpu_mesh


def error_text(fn):
    try:
        fn()
    except (LongmeshError, NotDistributedError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# -- distribute_tensor ---------------------------------------------------------------------------


def scattered(shape, mesh_shape, placements, order, source):
    mesh = cpu_mesh(*mesh_shape)
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
    coordinate = mesh.get_coordinate()
    mine = whole if all(c == source for c in coordinate) else torch.full_like(whole, -1)
    x = distribute_tensor(mine, mesh, placements, src_data_rank=source, shard_order=order)
    kept = distribute_tensor(whole, mesh, placements, src_data_rank=None, shard_order=order)
    return torch.equal(x.full_tensor(), whole) and torch.equal(x.to_local(), kept.to_local())


@pytest.mark.parametrize("source", [0, 1])
@pytest.mark.parametrize(
    ("mesh_shape", "placements", "order"),
    [
        ((4,), [Shard(0)], None),
        ((4,), [Shard(-1)], None),
        ((4,), [Replicate()], None),
        ((2, 2), [Shard(0), Shard(0)], [(0, (1, 0))]),
        ((2, 2), [Replicate(), Shard(1)], None),
        ((2, 2), [Partial(), Shard(1)], None),
        ((2, 2), [Partial("max"), Partial("max")], None),
    ],
)
def test_distribute_tensor_takes_the_source_ranks_data(pool, mesh_shape, placements, order, source):
    for shape in ((9, 5), (0, 3), (1, 1), (3, 7)):
        assert pool.run(scattered, shape, mesh_shape, placements, order, source, ranks=4) == [True] * 4


def silent():
    mesh = cpu_mesh(2)
    with record_comm() as log:
        x = distribute_tensor(torch.ones(3, 2), mesh, [Shard(0)], src_data_rank=None)
        DTensor.from_local(x.to_local(), mesh, [Shard(0)], shape=(3, 2)).to_local()
        longmesh.zeros(3, 2, device_mesh=mesh, placements=[Shard(0)])
    return log.events


def test_what_sends_nothing(pool):
    assert pool.run(silent, ranks=2) == [[], []]


# -- from_local, to_local ------------------------------------------------------------------------


def roundtrip(op):
    mesh = cpu_mesh(3)
    local = (torch.arange(4.0) + dist.get_rank()).requires_grad_()
    x = DTensor.from_local(local, mesh, [Partial(op)])
    y = x.to_local()
    (y * 2).sum().backward()
    return local.grad.tolist(), x.full_tensor().tolist(), x.requires_grad


def test_gradient_of_terms_and_back_is_the_identity(pool):
    for op, total in (("sum", 3.0), ("avg", 1.0)):
        grad, full, needs_grad = pool.run(roundtrip, op, ranks=3)[0]
        assert grad == [2.0] * 4
        assert full == [total + (3 * i if op == "sum" else i) for i in range(4)]
        assert needs_grad


def grad_placements():
    mesh = cpu_mesh(2)
    local = torch.ones(2, requires_grad=True)
    rank = dist.get_rank()
    x = DTensor.from_local(local, mesh, [Replicate()], grad_placements=[Replicate()])
    # Each rank uses its replica in another way: the gradients are terms of a sum.
    (x.to_local(grad_placements=[Partial()]) * (rank + 1)).sum().backward()
    return local.grad.tolist()


def test_grad_placements_of_to_local(pool):
    assert pool.run(grad_placements, ranks=2) == [[3.0, 3.0]] * 2


def used_twice():
    mesh = cpu_mesh(2)
    whole = torch.arange(3.0)
    x = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
    y = x.redistribute(placements=[Replicate()])
    z = x.redistribute(placements=[Partial()])
    (y.to_local() * 2 + z.full_tensor() * 3).sum().backward()
    return x.grad.placements, x.grad.full_tensor().tolist()


def test_gradients_of_two_uses_add_up_in_the_tensors_layout(pool):
    assert pool.run(used_twice, ranks=2) == [((Shard(0),), [5.0] * 3)] * 2


class OneOfTwo(torch.autograd.Function):
    """Two results, of which a program may use one: the other has no gradient, or plain zeros that torch fills in."""

    @staticmethod
    def forward(ctx, x, y, fills):
        ctx.set_materialize_grads(fills)
        return x * 2, y * 3

    @staticmethod
    def backward(ctx, x_grad, y_grad):
        return x_grad * 2, y_grad, None


def no_gradient():
    """Each way in which a DTensor is made of others, followed by a step that gives it no gradient."""
    mesh = cpu_mesh(2)
    leaf = torch.arange(4.0).reshape(2, 2).requires_grad_()
    x = DTensor.from_local(leaf, mesh, [Shard(0)])
    layer = parallelize_module(
        nn.Linear(2, 2), mesh, ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    )
    with loss_parallel():
        losses = nn.functional.cross_entropy(
            x.redistribute(mesh, [Shard(1)]), torch.tensor([0, 1, 1, 0]), reduction="none"
        )
    made = [
        x, x.redistribute(mesh, [Replicate()]), DTensor.from_local(x.to_local(), mesh, [Shard(0)]),
        nn.functional.linear(x, x), x @ x.mT, torch.einsum("ij,kj->ik", x, x), layer(x), losses,
    ]  # fmt: skip
    grads = []
    for y in made:
        leaf.grad = None
        OneOfTwo.apply(x, y, False)[0].sum().backward(retain_graph=True)
        grads.append(leaf.grad.unique().tolist())
    return grads, error_text(
        lambda: OneOfTwo.apply(x, x.redistribute(mesh, [Replicate()]), True)[0].sum().backward()
    )


def test_a_result_without_gradient_passes_none_on(pool):
    for grads, text in pool.run(no_gradient, ranks=2):
        assert grads == [[2.0]] * 8
        assert text.startswith(
            "LongmeshError: the gradient that goes back through redistribute is a plain tensor of"
        )


def mixed_precision():
    mesh = cpu_mesh(2)
    x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]).requires_grad_()
    with record_comm() as log:
        y = x.redistribute(
            placements=[Replicate()], forward_dtype=torch.bfloat16, backward_dtype=torch.float64
        )
    y.to_local().float().sum().backward()
    return str(y.dtype), log.events[0].dtype, str(x.grad.dtype)


def test_redistribute_in_another_precision(pool):
    assert pool.run(mixed_precision, ranks=2)[0] == ("torch.bfloat16", "bfloat16", "torch.float32")


def checked(sizes, shape):
    mesh = cpu_mesh(len(sizes))
    local = torch.full((sizes[dist.get_rank()],), float(dist.get_rank()))
    return error_text(lambda: DTensor.from_local(local, mesh, [Shard(0)], run_check=True, shape=shape))


def test_run_check_raises_on_every_rank_or_none(pool):
    assert pool.run(checked, [2, 2, 1], (5,), ranks=3) == ["no error"] * 3
    uneven = pool.run(checked, [2, 2, 1], None, ranks=3)
    assert len(set(uneven)) == 1
    assert "shards of different sizes [[2], [2], [1]]" in uneven[0]
    assert "pass the global shape=" in uneven[0]
    wrong = pool.run(checked, [1, 2, 2], (5,), ranks=3)
    assert len(set(wrong)) == 1
    assert "gives coordinate (0,) a shard of (2,), but it holds (1,)" in wrong[0]


def replicas():
    mesh = cpu_mesh(2)
    return (
        DTensor.from_local(torch.full((2,), float(dist.get_rank())), mesh, run_check=True).to_local().tolist()
    )


def test_run_check_makes_replicas_equal(pool):
    assert pool.run(replicas, ranks=2) == [[0.0, 0.0]] * 2


# -- factories, modules, copies ------------------------------------------------------------------


def factories():
    mesh = cpu_mesh(3)
    with mesh:
        made = [
            longmesh.zeros(5, 2, placements=[Shard(0)]),
            longmesh.ones((5, 2), placements=[Partial()], dtype=torch.float64),
            longmesh.full([5, 2], 7, placements=[Shard(1)], requires_grad=False),
            longmesh.full((2,), 3.0, placements=[Partial("product")]),
            longmesh.ones(2, placements=[Partial("max")], requires_grad=True),
            longmesh.empty(0, placements=[Shard(0)]),
        ]
    return [
        (m.full_tensor().tolist(), str(m.dtype), m.requires_grad, tuple(m.to_local().shape)) for m in made
    ]


def test_factories(pool):
    rows = pool.run(factories, ranks=3)[2]
    assert rows == [
        ([[0.0] * 2] * 5, "torch.float32", False, (1, 2)),
        ([[1.0] * 2] * 5, "torch.float64", False, (5, 2)),
        ([[7] * 2] * 5, "torch.int64", False, (5, 0)),
        ([3.0] * 2, "torch.float32", False, (2,)),
        ([1.0] * 2, "torch.float32", True, (2,)),
        ([], "torch.float32", False, (0,)),
    ]


def copies():
    mesh = cpu_mesh(2)
    x = distribute_tensor(nn.Parameter(torch.arange(3.0)), mesh, [Shard(0)])
    x.grad = distribute_tensor(torch.ones(3), mesh, [Shard(0)], src_data_rank=None)
    deep = copy.deepcopy(x)
    thawed = pickle.loads(pickle.dumps(x))
    file = io.BytesIO()
    torch.save({"w": x}, file)
    file.seek(0)
    loaded = torch.load(file)["w"]
    inner, context = x.__tensor_flatten__()
    rebuilt = DTensor.__tensor_unflatten__({inner[0]: x._local_tensor}, context, x.shape, x.stride())
    same = [torch.equal(y.full_tensor(), torch.arange(3.0)) for y in (deep, thawed, loaded, rebuilt)]
    kinds = [isinstance(y, nn.Parameter) for y in (x, deep, thawed, loaded)]
    apart = deep.to_local().data_ptr() != x.to_local().data_ptr()
    return same, kinds, apart, deep.grad.full_tensor().tolist(), repr(x)


def test_copy_pickle_save_flatten(pool):
    same, kinds, apart, grad, text = pool.run(copies, ranks=2)[0]
    assert same == [True] * 4
    assert kinds == [True] * 4
    assert apart
    assert grad == [1.0] * 3
    assert text.startswith("DTensor(local_tensor=tensor([0., 1.])")
    assert "placements=(Shard(dim=0),), requires_grad=True)" in text


def module():
    mesh = cpu_mesh(2)
    torch.manual_seed(dist.get_rank())
    net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))

    def partition(name, mod, mesh):
        if isinstance(mod, nn.Linear):
            mod.register_parameter("weight", distribute_tensor(mod.weight, mesh, [Shard(0)]))

    distribute_module(
        net,
        mesh,
        partition,
        lambda m, inputs, mesh: inputs,
        lambda m, out, mesh: out.redistribute(placements=[Replicate()]),
    )
    state = {
        k: (v.placements, isinstance(v, nn.Parameter)) for k, v in net.state_dict(keep_vars=True).items()
    }
    other = copy.deepcopy(net)
    other.load_state_dict(net.state_dict())
    return state, net[0].weight.full_tensor(), other[0].weight.full_tensor()


def test_distribute_module_and_state_dict(pool):
    (state, weight, loaded), (_, other, _) = pool.run(module, ranks=2)
    assert state["0.weight"] == ((Shard(0),), True)
    assert state["0.bias"] == ((Replicate(),), True)
    assert state["1.running_mean"] == ((Replicate(),), False)
    assert torch.equal(weight, other)
    assert torch.equal(weight, loaded)


# -- mistakes --------------------------------------------------------------------------------------


def mistakes():
    mesh = cpu_mesh(2, names=("tp",))
    other = cpu_mesh(1, 2)
    x = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    leaf = torch.ones(2, requires_grad=True)
    return {
        "dim": error_text(lambda: distribute_tensor(torch.ones(4), mesh, [Shard(1)])),
        "negative dim": error_text(lambda: distribute_tensor(torch.ones(4), mesh, [Shard(-2)])),
        "scalar": error_text(lambda: distribute_tensor(torch.ones(()), mesh, [Shard(0)])),
        "count": error_text(lambda: x.redistribute(placements=[Shard(0), Replicate()])),
        "none": error_text(lambda: x.redistribute()),
        "mesh": error_text(lambda: x.redistribute(other, [Replicate(), Replicate()])),
        "two meshes": error_text(
            lambda: x + distribute_tensor(torch.ones(4, 2), other, [Shard(0), Replicate()])
        ),
        "shards": error_text(lambda: DTensor.from_local(torch.ones(3), mesh, [Shard(0)], shape=(5,)).shape),
        "leaf": error_text(lambda: distribute_tensor(leaf * 2, mesh, [Shard(0)])),
        "dtensor": error_text(lambda: DTensor.from_local(x, mesh, [Shard(0)])),
        "again": error_text(lambda: distribute_tensor(x, mesh, [Replicate()])),
        "source": error_text(lambda: distribute_tensor(torch.ones(4), mesh, [Shard(0)], src_data_rank=2)),
        "no mesh": error_text(lambda: longmesh.zeros(3)),
        "product": error_text(lambda: DTensor.from_local(leaf, mesh, [Partial("product")])),
        "max": error_text(lambda: x.detach().requires_grad_().redistribute(placements=[Partial("max")])),
        "avg": error_text(
            lambda: longmesh.ones(2, dtype=torch.int64, device_mesh=mesh, placements=[Partial("avg")])
        ),
        "foreign": error_text(lambda: x.redistribute(placements=["Shard(0)"])),
        "order": error_text(lambda: x.redistribute(placements=[Shard(1)], shard_order=[(0, (0,))])),
        "sparse": error_text(lambda: longmesh.zeros(2, layout=torch.sparse_coo, device_mesh=mesh)),
        "to sparse": error_text(lambda: x.to_sparse()),
        "pending to sparse": error_text(lambda: x.sum(0).to_sparse()),
        "to csr": error_text(lambda: x.to_sparse_csr()),
        "differ": error_text(lambda: distribute_tensor(torch.ones(3 + dist.get_rank()), mesh, [Shard(0)])),
    }


def test_mistakes_say_what_is_wrong_and_what_to_do_on_all_ranks(pool):
    first, second = pool.run(mistakes, ranks=2)
    expected = {
        "dim": "Shard(1) on axis 'tp' is out of range for a tensor of shape (4,); allowed are dims 0 to 0",
        "negative dim": "Shard(dim=-2) is out of range for a tensor of 1 dims; allowed are -1 to 0",
        "scalar": "a scalar can't be sharded",
        "count": "2 placements (Shard(dim=0), Replicate()) for a mesh of 1 axes (2,); give one placement per mesh axis",
        "none": "redistribute needs placements=",
        "mesh": "redistribute stays on the tensor's mesh",
        "two meshes": "one op on tensors of two meshes",
        "leaf": "distribute_tensor takes a leaf tensor",
        "dtensor": "from_local takes this rank's plain tensor, got a DTensor",
        "again": "use redistribute() to change its layout",
        "source": "src_data_rank=2 is a place on every mesh axis, and the mesh is (2,); allowed are 0 to 1",
        "no mesh": "zeros needs a mesh",
        "product": "no gradient goes through Partial(product)",
        "max": "no gradient goes through Partial(max)",
        "avg": "an average of integers is not an integer",
        "foreign": "is not a longmesh placement",
        "order": "dim 0 is sharded over axes [0], but the placements (Shard(dim=1),) shard it over axes none",
        "sparse": "a DTensor is strided",
        "to sparse": "its result has no strides, and a DTensor is strided; convert a whole tensor, x.full_tensor()",
        "pending to sparse": "aten._to_sparse.default of a DTensor: its result has no strides",
        "to csr": "aten._to_sparse_csr.default of a DTensor: its result has no strides",
        "differ": "every rank must pass the same",
    }
    for case, text in expected.items():
        assert text in first[case], (case, first[case])
        assert first[case] == second[case], case
    assert "gives coordinate (1,) a shard of (2,), but its local tensor is (3,)" in second["shards"]


def without_memory():
    """What torch would do to the memory of a DTensor, which has none: some of it ends the process."""
    x = distribute_tensor(torch.arange(5.0), cpu_mesh(2), [Shard(0)])
    total = x.sum()
    texts = {
        name: error_text(lambda name=name: getattr(x, name)())
        for name in ("apply_", "map_", "map2_", "numpy", "tolist", "share_memory_", "__dlpack__", "__array__")
    }
    return (
        texts,
        error_text(lambda: f"{total:.2f}"),
        f"{total.redistribute(placements=[Replicate()]):.2f}",
        f"{total}",
    )


def test_methods_on_a_tensors_memory_are_refused(pool):
    for texts, pending, number, plain in pool.run(without_memory, ranks=2):
        for name, text in texts.items():
            method = "numpy" if name == "__array__" else name
            assert text.startswith(f"LongmeshError: {method}() works on a tensor's own memory"), (name, text)
        assert "formatting sends nothing" in pending and number == "10.00" and plain.startswith("DTensor(")


def outside():
    mesh = DeviceMesh("cpu", torch.tensor([0, 1]))
    if dist.get_rank() == 2:
        return error_text(lambda: comm_of(mesh))
    return distribute_tensor(torch.ones(4), mesh, [Shard(0)]).full_tensor().tolist()


def test_a_rank_outside_the_mesh(pool):
    results = pool.run(outside, ranks=3)
    assert results[:2] == [[1.0] * 4] * 2
    assert results[2] == (
        "NotDistributedError: rank 2 is not in the mesh [0, 1]; call this on the mesh's own ranks only"
    )


def no_process_group():
    mesh = cpu_mesh(1)
    dist.destroy_process_group()
    fresh = DeviceMesh.__new__(DeviceMesh)
    fresh.__dict__.update(mesh.__dict__)
    raise NotDistributedError(error_text(lambda: longmesh.zeros(2, device_mesh=fresh)))


def test_no_process_group(pool):
    with pytest.raises(RankError, match=r"no process group: start this script with `longmesh run"):
        pool.run(no_process_group, ranks=1)


def many_shapes():
    mesh = cpu_mesh(2)
    layout = Layout(mesh, [Shard(0)])
    comm = comm_of(mesh)
    kept = tensor_layout(comm, layout, (4, 4), (4, 1), torch.float32)
    for n in range(20_000):
        tensor_layout(comm, layout, (n, 4), (4, 1), torch.float32)
    x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    return len(comm.layouts), (x + x).sum().item(), kept.shape


def test_layouts_that_are_remembered_are_bounded(pool):
    for count, total, shape in pool.run(many_shapes, ranks=2):
        assert count <= 1 << 13 and total == 32.0 and shape == (4, 4)


def shapes_and_offsets(mesh_shape):
    """Against torch's private function of the same name, and against what ranks hold."""
    from torch.distributed.tensor import Replicate as R, Shard as S
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as theirs

    mesh = cpu_mesh(*mesh_shape)
    wrong = []
    for shape in ((5, 4), (1, 7), (8, 2), (0, 3)):
        for dims in itertools.product((0, 1, None), repeat=mesh.ndim):
            ours = [Replicate() if d is None else Shard(d - 2) for d in dims]
            given = [R() if d is None else S(d) for d in dims]
            found = longmesh.compute_local_shape_and_global_offset(shape, mesh, ours)
            part = longmesh.zeros(shape, device_mesh=mesh, placements=ours).to_local()
            if found[0] != tuple(part.shape) or found[0] != theirs(shape, mesh, given)[0]:
                wrong.append((shape, dims, found))
            if part.numel() and found[1] != theirs(shape, mesh, given)[1]:
                wrong.append((shape, dims, found))
            if longmesh.compute_local_shape_and_global_offset(shape, mesh, ours, True)[1] != ():
                wrong.append((shape, dims))
    x = longmesh.zeros((5, 4), device_mesh=mesh, placements=[Shard(0)] * mesh.ndim)
    same = x._spec.placements == x.placements and x._spec.device_mesh is mesh
    return wrong, same and tuple(x._spec.tensor_meta.shape) == (5, 4)


def test_shape_and_offset_of_a_shard(pool):
    assert pool.run(shapes_and_offsets, (3,), ranks=3) == [([], True)] * 3
    assert pool.run(shapes_and_offsets, (2, 2), ranks=4) == [([], True)] * 4
