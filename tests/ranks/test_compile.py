"""torch.compile of functions of DTensors: full graphs, forward and backward, sizes that change."""

import shutil

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils.checkpoint import checkpoint

from longmesh import DTensor, Replicate, Shard, distribute_tensor, zeros
from longmesh.errors import LongmeshError
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


OF_A_RANK_WITH_NOTHING = (
    lambda x, w: (x.tanh() @ x.t()).softmax(-1)[:, :2],
    lambda x, w: torch.nn.functional.layer_norm(x, x.shape[-1:]) * x.norm(),
    lambda x, w: torch.nn.functional.linear(x, w)[1:].cumsum(0) * x.sum(),
    lambda x, w: checkpoint(lambda x: (x @ x.t()).tanh(), x.roll(1, 1), use_reentrant=False),
)


def gradients_with_an_empty_rank(backend, shape, placement, number):
    """Each rank traces another graph here; torch would copy a collective of one of them into its backward."""
    torch._dynamo.reset()
    program = OF_A_RANK_WITH_NOTHING[number]
    torch.manual_seed(0)
    whole = [torch.randn(shape, dtype=torch.float64), torch.randn(5, shape[1], dtype=torch.float64)]
    parts = [distribute_tensor(t, cpu_mesh(4), [placement]).requires_grad_() for t in whole]
    torch.compile(program, backend=backend)(*parts).square().sum().backward()
    whole = [t.requires_grad_() for t in whole]
    program(*whole).square().sum().backward()
    return [
        torch.allclose(p.grad.full_tensor(), t.grad)
        for p, t in zip(parts, whole, strict=True)
        if t.grad is not None
    ]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("backend", "shape", "placement", "number"),
    [
        ("aot_eager", (4, 3), Shard(1), 0),
        ("aot_eager", (3, 5), Shard(0), 1),
        ("aot_eager", (3, 5), Shard(0), 2),
        ("aot_eager", (4, 3), Shard(1), 3),
        ("inductor", (4, 3), Shard(1), 0),
    ],
    ids=["product", "norm", "scan", "checkpoint", "inductor"],
)
def test_backward_where_a_rank_holds_nothing(pool, backend, shape, placement, number):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor compiles with g++, and there is none")
    given = (backend, shape, placement, number)
    for right in pool.run(gradients_with_an_empty_rank, *given, ranks=4, timeout=300.0):
        assert right and all(right)


def view_as_input():
    """A view that does not begin where its base begins, and one that had to be copied."""
    torch._dynamo.reset()
    whole = torch.randn(4, 3)
    x = distribute_tensor(whole, cpu_mesh(2), [Shard(1)]).requires_grad_()
    out = torch.compile(lambda x: x.tanh() * 2, backend="aot_eager")(x[1:])
    right = [torch.allclose(out.full_tensor(), whole[1:].tanh() * 2)]
    copied = x.detach()[:, 1:]
    out = torch.compile(lambda x: (x * 2)[:, 1:], backend="aot_eager")(copied)
    right.append(torch.equal(out.mul_(2).full_tensor(), whole[:, 2:] * 4))
    errors = []
    for function, given in (
        (lambda x: x.mul_(2).sum(), (copied,)),
        (lambda base, view: base.mul_(3).sum() + view.sum(), (x.detach(), copied)),
    ):
        with pytest.raises(BackendCompilerFailed) as raised:
            torch.compile(function, backend="aot_eager")(*given)
        errors.append(str(raised.value))
    before = torch.compile(lambda base, view: (view + 1, base.mul_(3)), backend="aot_eager")
    right.append(torch.equal(before(x.detach(), copied)[0].full_tensor(), whole[:, 1:] + 1))
    right.append(torch.equal(copied.full_tensor(), whole[:, 1:] * 3))
    return right, errors


# torch's compiler itself looks at the .grad of a view.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_views_as_inputs(pool):
    for right, (written, read) in pool.run(view_as_input, ranks=2, timeout=120.0):
        assert right == [True] * 4
        assert "a compiled function writes in place to a view of shape (4, 2) that it was given" in written
        assert (
            "a compiled function reads a view of shape (4, 2) that it was given, and that had to be copied, after it "
            "has written to another tensor that it was given, which may be its base: the copy may be outdated; take "
            "the view inside of the function, or give it view.clone()"
        ) in read


def second_derivative():
    torch._dynamo.reset()
    x = distribute_tensor(torch.randn(4, 3), cpu_mesh(2), [Shard(0)]).requires_grad_()
    loss = torch.compile(lambda x: x.tanh().sum(), backend="aot_eager")(x) + x.square().sum()
    with pytest.raises(LongmeshError) as raised:
        torch.autograd.grad(loss, x, create_graph=True)
    return str(raised.value)


def test_a_second_derivative_is_refused(pool):
    """torch would leave the part of the compiled function out."""
    expected = (
        "a backward with create_graph=True through a compiled function of DTensors: torch.compile has no second "
        "derivatives, and its part of them would be left out; call the function that is not compiled there"
    )
    assert pool.run(second_derivative, ranks=2, timeout=120.0) == [expected] * 2


def made_inside():
    """DTensors that a compiled function makes itself: in its graph, and between its graphs."""
    torch._dynamo.reset()
    mesh = cpu_mesh(3)  # whose groups nobody has made yet
    whole = torch.arange(14.0).view(7, 2)
    mine = whole.chunk(3)[mesh.get_rank()].clone().requires_grad_()

    def around(part):
        x = DTensor.from_local(part, mesh, [Shard(0)], shape=whole.shape, stride=whole.stride())
        return (x * 2).redistribute(placements=[Shard(1)]).square().full_tensor()

    out = torch.compile(around, backend="aot_eager", fullgraph=True)(mine)
    out.sum().backward()
    right = [torch.equal(out, (whole * 2).square()), torch.equal(mine.grad, mine.detach() * 8)]
    equal = torch.compile(lambda t: DTensor.from_local(t, mesh).sum(), backend="aot_eager", fullgraph=True)
    right.append(equal(torch.ones(4)).item() == 4)

    def between(t):
        checked = DTensor.from_local(t, mesh, run_check=True)
        made = distribute_tensor(t, mesh, [Shard(0)]) + checked
        return made + zeros(7, device_mesh=mesh, placements=[Shard(0)])

    ones = torch.ones(7)
    right.append(torch.equal(torch.compile(between, backend="aot_eager")(ones).full_tensor(), ones * 2))
    return right


def test_dtensors_that_are_made_inside(pool):
    assert pool.run(made_inside, ranks=3, timeout=120.0) == [[True] * 4] * 3
