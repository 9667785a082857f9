"""Matrix products on real ranks against plain torch: values, gradients, uneven and empty contractions, what is sent."""

import pytest
import torch
from torch.nn import functional

from longmesh import Partial, Replicate, Shard
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
    "linear": (functional.linear, [(5, 4), (3, 4), (3,)]),
    "linear 3d": (functional.linear, [(2, 5, 4), (3, 4), (3,)]),
    "bilinear": (functional.bilinear, [(4, 3), (4, 5), (2, 3, 5), (2,)]),
    "einsum": (lambda x, y: torch.einsum("bij,bkj->bik", x, y), [(2, 5, 4), (2, 3, 4)]),
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
            (name, text) for text in compare_op(fn, tensors, mesh_shape, trials=5 - len(mesh_shape), seed=i)
        ]
    return found


@pytest.mark.parametrize("mesh_shape", [(3,), (2, 2)], ids=str)
def test_against_plain_torch(pool, mesh_shape):
    ranks = torch.Size(mesh_shape).numel()
    assert pool.run(cases, mesh_shape, ranks=ranks)[0] == []


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
        ]
    return log.events, [str(t._layout) for t in made]


def test_what_sends_nothing(pool):
    events, layouts = pool.run(silence, ranks=3)[0]
    assert events == []
    assert layouts == ["S(0)", "S(1)", "P", "P", "P", "S(1)", "S(0)", "S(0)", "S(0)", "P"]
