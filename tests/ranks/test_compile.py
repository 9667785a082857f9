"""torch.compile of functions of DTensors: full graphs, forward and backward, sizes that change."""

import shutil

import pytest
import torch

from longmesh import Replicate, Shard, distribute_tensor
from longmesh.testing import cpu_mesh


def program(x, w):
    y = torch.relu(torch.nn.functional.linear(x, w)) * 2 + 1
    return y.redistribute(placements=[Replicate()]).square().sum()


def sharded_output(x, w):
    return torch.tanh(torch.nn.functional.linear(x, w))


def backward_outside(backend, shape, of_input, of_weight):
    """The gradient of a compiled function's sharded output comes replicated: it is brought where it was traced."""
    torch._dynamo.reset()
    mesh = cpu_mesh(2)
    results = []
    for run in (sharded_output, torch.compile(sharded_output, backend=backend, fullgraph=True)):
        torch.manual_seed(0)
        w = distribute_tensor(torch.randn(6, 8), mesh, [of_weight]).requires_grad_()
        out = run(distribute_tensor(torch.randn(shape), mesh, [of_input]), w)
        out.sum().backward()
        results.append((out.placements, w.grad.full_tensor()))
    written = distribute_tensor(torch.ones(7, 1), mesh, [Shard(1)])  # its part is empty on one rank
    total = torch.compile(lambda x: x.mul_(0.5).sum(), backend=backend)(written)
    assert (total.full_tensor().item(), written.full_tensor().sum().item()) == (3.5, 3.5)
    (layout, grad), (compiled_layout, compiled_grad) = results
    return layout == compiled_layout and torch.allclose(grad, compiled_grad)


@pytest.mark.parametrize(
    ("shape", "of_input", "of_weight"),
    [((3, 8), Replicate(), Shard(0)), ((2, 3, 8), Shard(1), Replicate())],
    ids=["a matrix", "a cut inside"],
)
def test_backward_of_a_compiled_output(pool, shape, of_input, of_weight):
    found = pool.run(backward_outside, "aot_eager", shape, of_input, of_weight, ranks=2, timeout=300.0)
    assert found == [True] * 2


def written_view(x):
    x.add_(1)
    return x[1:].mul_(2)


def views():
    """A view that was copied and written to in a compiled function: its copy, and what returning itself gives."""
    torch._dynamo.reset()
    x = distribute_tensor(torch.ones(4, 3), cpu_mesh(2), [Shard(0)])
    copied = torch.compile(lambda x: written_view(x).clone(), backend="aot_eager")(x)
    values = copied.full_tensor().tolist() == [[4.0] * 3] * 3, x.full_tensor()[:, 0].tolist()
    try:
        return values, torch.compile(written_view, backend="aot_eager")(x)
    except Exception as error:
        return values, str(error)


def test_views_that_are_written(pool):
    for values, text in pool.run(views, ranks=2, timeout=120.0):
        assert values == (True, [2.0, 4.0, 4.0, 4.0])
        assert "a compiled function returns a view of shape (3, 3) that it has written to" in text
        assert "return a copy, view.clone(), or the base" in text


def compiled(backend, dynamic, sizes):
    torch._dynamo.reset()
    mesh = cpu_mesh(2)
    torch.manual_seed(0)
    fn = torch.compile(program, backend=backend, fullgraph=True, dynamic=dynamic)
    outcomes = []
    for n in sizes:
        whole, weight = torch.randn(n, 8), torch.randn(6, 8)
        results = []
        for run in (program, fn):
            w = distribute_tensor(weight, mesh, [Shard(0)]).requires_grad_()
            out = run(distribute_tensor(whole, mesh, [Replicate()]), w)
            out.backward()
            results.append((out.detach().full_tensor(), w.grad.full_tensor(), w.grad.placements))
        (a, b, c), (d, e, f) = results
        outcomes.append(torch.allclose(a, d) and torch.allclose(b, e) and c == f)
    return outcomes


# torch itself warns of torch.jit when it loads its compiler.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("backend", "dynamic"), [("eager", None), ("aot_eager", False), ("aot_eager", None), ("inductor", None)]
)
def test_compiled_equals_eager(pool, backend, dynamic):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor compiles with g++, and there is none")
    sizes = [4, 4, 6]
    assert pool.run(compiled, backend, dynamic, sizes, ranks=2, timeout=300.0) == [[True] * 3] * 2
