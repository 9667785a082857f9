"""Matrix products on real ranks against plain torch: values, gradients, uneven and empty contractions, what is sent."""

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from longmesh import Partial, Replicate, Shard, distribute_tensor
from longmesh.comm import record_comm
from longmesh.spec import Layout
from longmesh.testing import cpu_mesh
from support.op_check import compare_op, distribute


def of(*shape):
    return torch.randn(shape, dtype=torch.float64)


PRODUCTS = {
    "mm": (torch.mm, [(5, 7), (7, 3)]),
    "mm of one": (torch.mm, [(5, 1), (1, 3)]),
    "mm of nothing": (torch.mm, [(5, 0), (0, 3)]),
    "mm of no rows": (torch.mm, [(0, 7), (7, 3)]),
    "addmm": (lambda b, x, y: torch.addmm(b, x, y, beta=0.5, alpha=2), [(3,), (5, 7), (7, 3)]),
    "addmm of nothing": (torch.addmm, [(5, 3), (5, 0), (0, 3)]),
    "addmm column": (torch.addmm, [(5, 1), (5, 4), (4, 3)]),
    "bmm": (torch.bmm, [(2, 5, 7), (2, 7, 3)]),
    "baddbmm": (torch.baddbmm, [(1, 3), (2, 5, 4), (2, 4, 3)]),
    "addbmm": (torch.addbmm, [(5, 3), (2, 5, 4), (2, 4, 3)]),
    "mv": (torch.mv, [(5, 7), (7,)]),
    "addmv": (torch.addmv, [(5,), (5, 7), (7,)]),
    "dot": (torch.dot, [(7,), (7,)]),
    "outer": (torch.outer, [(5,), (3,)]),
    "addr": (torch.addr, [(5, 3), (5,), (3,)]),
    "matmul": (torch.matmul, [(2, 5, 4), (4, 3)]),
    "matmul broadcast": (torch.matmul, [(2, 1, 5, 4), (3, 4, 2)]),
    "matmul of heads": (torch.matmul, [(2, 5, 3, 4), (2, 5, 4, 3)]),
    "matmul by a vector": (torch.matmul, [(2, 5, 4), (4,)]),
    "vector by matmul": (torch.matmul, [(4,), (2, 5, 4, 3)]),
    "matmul of nothing": (torch.matmul, [(2, 5, 0), (2, 0, 3)]),
    "linear": (functional.linear, [(5, 4), (3, 4), (3,)]),
    "linear 3d": (functional.linear, [(2, 5, 4), (3, 4), (3,)]),
    "bilinear": (functional.bilinear, [(4, 3), (4, 5), (2, 3, 5), (2,)]),
    "einsum": (lambda x, y: torch.einsum("bij,bkj->bik", x, y), [(2, 5, 4), (2, 3, 4)]),
    "einsum of heads": (lambda x, y: torch.einsum("bhqd,bhkd->bhqk", x, y), [(2, 5, 3, 4), (2, 5, 2, 4)]),
    "einsum over heads": (lambda x, y: torch.einsum("bqhd, hde -> bqe", x, y), [(2, 3, 5, 4), (5, 4, 2)]),
    "einsum of a sum": (lambda x, y: torch.einsum("bhd,d->b", x, y), [(2, 5, 4), (4,)]),
    "einsum with dots": (lambda x, y: torch.einsum("...hd,hd->...h", x, y), [(2, 5, 4), (5, 4)]),
    "einsum sum": (lambda x, y: torch.einsum("ij,jk->", x, y), [(5, 4), (4, 3)]),
    "tensordot": (lambda x, y: torch.tensordot(x, y, dims=2), [(5, 2, 4), (2, 4, 3)]),
    "kron": (torch.kron, [(2, 3), (3, 2)]),
    "cdist": (lambda x, y: torch.cdist(x, y, 1.0), [(5, 3), (4, 3)]),
    "addmm_": (lambda b, x, y: b.clone().addmm_(x, y), [(5, 3), (5, 7), (7, 3)]),
}


def cases(mesh_shape):
    torch.manual_seed(0)
    found = []
    for i, (name, (fn, shapes)) in enumerate(PRODUCTS.items()):
        tensors = [of(*shape) for shape in shapes]
        found += [
            (name, text) for text in compare_op(fn, tensors, mesh_shape, trials=4 - len(mesh_shape), seed=i)
        ]
    return found


@pytest.mark.parametrize("mesh_shape", [(3,), (2, 2)], ids=str)
def test_against_plain_torch(pool, mesh_shape):
    ranks = torch.Size(mesh_shape).numel()
    assert pool.run(cases, mesh_shape, ranks=ranks)[0] == []


def second_derivatives(x, w, b):
    """Gradients of the norm of gradients."""
    x, w, b = (t.detach().requires_grad_() for t in (x, w, b))
    y = functional.linear(x, w, b).square() @ w
    first = torch.autograd.grad(y.square().sum(), (x, w, b), create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in first), (x, w, b))


def recomputed(x, w, b):
    """An activation checkpoint, recomputed by torch.autograd.grad."""
    x, w, b = (t.detach().requires_grad_() for t in (x, w, b))
    y = checkpoint(lambda x: functional.linear(x, w, b).relu() @ w, x, use_reentrant=False)
    return torch.autograd.grad(y.sum(), (x, w, b), materialize_grads=True)


def in_lower_precision(x, w, b):
    with torch.autocast("cpu", torch.bfloat16):
        return functional.linear(x.float(), w.float(), b.float()) @ w.float()


def by_transform(x, w, b):
    return torch.func.grad(lambda x: functional.linear(x, w, b).square().sum())(x)


def without_gradients(x, w, b):
    with torch.inference_mode():
        y = functional.linear(x, w, b)
        return y @ w, torch.einsum("bsd,dc->bsc", y, w), torch.einsum("...d,dc->...c", y, w)


WAYS = (second_derivatives, recomputed, in_lower_precision, by_transform, without_gradients)


def ways_on_a_cut_inside():
    torch.manual_seed(0)
    tensors = [of(2, 5, 4), of(4, 4), of(4)]
    found = []
    for placements in ("S(1) R R", "S(1) S(0) S(0)", "P S(1) R"):
        layouts = [[PLACEMENTS[p]] for p in placements.split()]
        for way in WAYS:
            tolerance = 0.05 if way is in_lower_precision else 1e-4  # bfloat16 has 8 bits
            texts = compare_op(way, tensors, (3,), layouts, grad=False, tolerance=tolerance)
            found += [(way.__name__, text) for text in texts]
    return found


PLACEMENTS = {"R": Replicate(), "P": Partial(), "S(0)": Shard(0), "S(1)": Shard(1)}


def test_a_cut_inside_in_every_way(pool):
    assert pool.run(ways_on_a_cut_inside, ranks=3)[0] == []


def silence():
    mesh = cpu_mesh(3)

    def place(shape, placement):
        return distribute(of(*shape), mesh, Layout(mesh, [placement]))

    torch.manual_seed(0)
    with record_comm() as log:
        made = [
            place((5, 7), Shard(0)) @ place((7, 3), Replicate()),
            place((5, 7), Replicate()) @ place((7, 3), Shard(1)),
            place((5, 7), Shard(1)) @ place((7, 3), Shard(0)),
            place((5, 7), Partial()) @ place((7, 3), Replicate()),
            functional.linear(place((5, 7), Shard(1)), place((3, 7), Shard(1)), place((3,), Replicate())),
            functional.linear(place((5, 7), Replicate()), place((3, 7), Shard(0)), place((3,), Shard(0))),
            torch.bmm(place((4, 5, 7), Shard(0)), place((4, 7, 3), Shard(0))),
            torch.einsum("bij,bkj->bik", place((4, 5, 7), Shard(0)), place((4, 3, 7), Shard(0))),
            torch.einsum("bhqd,bhkd->bhqk", place((3, 4, 5, 7), Shard(0)), place((3, 4, 3, 7), Shard(0))),
            torch.dot(place((7,), Shard(0)), place((7,), Shard(0))),
            functional.linear(
                place((2, 5, 7), Shard(1)), place((3, 7), Replicate()), place((3,), Replicate())
            ),
            place((2, 5, 3, 7), Shard(1)) @ place((2, 5, 7, 3), Shard(1)),
            torch.einsum("bhqd,bhkd->bhqk", place((3, 4, 5, 7), Shard(1)), place((3, 4, 3, 7), Shard(1))),
        ]
    return log.events, [str(t._layout) for t in made]


def silent_gradients():
    mesh = cpu_mesh(3)
    torch.manual_seed(0)
    x, w, b = (
        distribute(of(*shape), mesh, Layout(mesh, [p])).requires_grad_()
        for shape, p in [((2, 5, 7), Shard(1)), ((3, 7), Replicate()), ((3,), Replicate())]
    )
    with record_comm() as log:
        y = functional.linear(x, w, b)
        y.backward(y.detach())
    return log.events, [str(t.grad._layout) for t in (x, w, b)]


def test_gradients_of_a_cut_batch_dim_send_nothing(pool):
    assert pool.run(silent_gradients, ranks=3)[0] == ([], ["S(1)", "P", "P"])


def test_what_sends_nothing(pool):
    events, layouts = pool.run(silence, ranks=3)[0]
    assert events == []
    assert layouts == [
        "S(0)",
        "S(1)",
        "P",
        "P",
        "P",
        "S(1)",
        "S(0)",
        "S(0)",
        "S(0)",
        "P",
        "S(1)",
        "S(1)",
        "S(1)",
    ]


def write_to_inputs_of_frozen_weights():
    """Inputs are written to between a product with a frozen weight and its backward; the largest error."""
    mesh, worst = cpu_mesh(2), 0.0
    torch.manual_seed(0)
    start, weight = torch.randn(3, 5, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    for product in (functional.linear, lambda x, w: x @ w.mT, lambda x, w: torch.einsum("abi,oi->abo", x, w)):
        for placement in (Shard(0), Shard(1), Replicate()):
            grads = []
            for to in (lambda t, _: t.clone(), lambda t, p: distribute_tensor(t, mesh, [p])):
                x = to(start, placement).requires_grad_()
                out = product(x, to(weight, Replicate()))
                with torch.no_grad():
                    x.mul_(3)
                out.square().sum().backward()
                grads.append(x.grad)
            worst = max(worst, (grads[1].full_tensor() - grads[0]).abs().max().item())
    return worst


def test_a_frozen_weight_does_not_keep_its_input(pool):
    assert max(pool.run(write_to_inputs_of_frozen_weights, ranks=2)) < 1e-12
