"""Views along sharded dims: what is written to them reaches the tensor that they are views of."""

import pytest
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from longmesh import DTensor, Replicate, Shard, distribute_tensor
from longmesh.errors import LongmeshError
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


def pieces(x, y):
    first, second = x.split([1, x.shape[0] - 1])
    first.fill_(7)
    second.mul_(2)
    x.unbind(0)[1].add_(5)
    return x


PROGRAMS = [add_to_a_row, row_read_after_a_write, write_through_several_views, pieces]


def run(shape, ranks, mesh_shape):
    mesh = cpu_mesh(*mesh_shape)
    wrong = []
    for program in PROGRAMS:
        for placement in (Shard(0), Shard(1), Replicate()):
            for inference in (False,):
                with torch.no_grad():
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
