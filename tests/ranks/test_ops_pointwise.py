"""Pointwise ops and tensors made after others on real ranks: values, gradients, writes in place, what is sent."""

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from longmesh import DTensor, Partial, Replicate, Shard, distribute_tensor
from longmesh.comm import record_comm
from longmesh.errors import LongmeshError
from longmesh.spec import Layout
from longmesh.testing import cpu_mesh
from support.op_check import compare_op, distribute

MESHES = [(3,), (2, 2)]

BINARY = {
    "add": torch.add,
    "sub": lambda x, y: torch.sub(x, y, alpha=2),
    "mul": torch.mul,
    "div": lambda x, y: x / (y.abs() + 1),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "where number": lambda x, y: torch.where(y > 0, x, 1.5),
    "lerp": lambda x, y: torch.lerp(x, y, y.sigmoid()),
    "addcmul": lambda x, y: torch.addcmul(x, y, x, value=3),
    "maximum": torch.maximum,
    "clamp": lambda x, y: torch.clamp(x, y.abs() - 1, y.abs()),
    "masked_fill": lambda x, y: x.masked_fill(y > 0, 2.0),
    "pow": lambda x, y: (x.abs() + 1) ** y,
    "chain": lambda x, y: (x.exp() - y).tanh() * 2 + 1,
    "in place": lambda x, y: x.clone().add_(y).mul_(2).sub_(1).clamp_(-1, 1),
    "compare": lambda x, y: (x > y, x == y, (x > 0) & (y > 0)),
    "complex": lambda x, y: (torch.complex(x, x).conj() * y).abs(),
    "atan2": torch.atan2,
}
UNARY = {
    "gelu": functional.gelu,
    "silu": functional.silu,
    "relu": functional.relu,
    "logsigmoid": functional.logsigmoid,
    "elu": functional.elu,
    "softplus": functional.softplus,
    "hardswish": functional.hardswish,
    "frexp": lambda x: torch.frexp(x).mantissa,
    "half": lambda x: (x.bfloat16() * 0).double() + x,
    "int": lambda x: (x * 3).long() + 1,
    "numbers": lambda x: 2 - x / -3 + x * -1,
    "like": lambda x: torch.zeros_like(x) + torch.ones_like(x) * x + torch.full_like(x, 2),
    "new": lambda x: (
        x.new_zeros(x.shape) + x,
        x.new_full((2, 3), 1.5),
        x.new_empty_strided((4,), (1,)).zero_(),
    ),
    "fill": lambda x: x.detach().clone().fill_(3.0) * x,
    "zero": lambda x: x.detach().clone().zero_() + x,
    "nan_to_num": lambda x: (x / 0).nan_to_num(1.0, 2.0, 3.0),
}


def cases(mesh_shape):
    torch.manual_seed(0)
    x, y = torch.randn(9, 5, dtype=torch.float64), torch.randn(9, 5, dtype=torch.float64)
    found = []
    for i, (name, fn) in enumerate(BINARY.items()):
        second = [y, y[0], y[:, :1], y[0, 0]][i % 4]
        found += [
            (name, text)
            for text in compare_op(fn, [x, second], mesh_shape, trials=5 - len(mesh_shape), seed=i)
        ]
    for i, (name, fn) in enumerate(UNARY.items()):
        first = [x, x[:1], x[:0], x[0, 0]][i % 4]
        found += [
            (name, text) for text in compare_op(fn, [first], mesh_shape, trials=5 - len(mesh_shape), seed=i)
        ]
    return found


@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
def test_against_plain_torch(pool, mesh_shape):
    ranks = torch.Size(mesh_shape).numel()
    assert pool.run(cases, mesh_shape, ranks=ranks)[0] == []


def minima(mesh_shape):
    """Pending minima and maxima through ops that keep, turn or break their order."""
    torch.manual_seed(0)
    x, y = torch.randn(4, 3, dtype=torch.float64) * 3, torch.randn(4, 3, dtype=torch.float64)
    functions = [
        lambda x, y: x * -2, lambda x, y: x * y, lambda x, y: -x + 1, lambda x, y: x.exp(), lambda x, y: x.abs(),
        lambda x, y: x.sqrt(), lambda x, y: torch.maximum(x, y), lambda x, y: y - x, lambda x, y: x.clone(),
        lambda x, y: x.float(), lambda x, y: torch.where(y > 0, x, y), lambda x, y: x.square(), lambda x, y: x.relu(),
    ]  # fmt: skip
    found = []
    for i, fn in enumerate(functions):
        partials = ("min", "max", "product")
        found += compare_op(fn, [x, y], mesh_shape, trials=4, seed=i, partials=partials, grad=False)
    return found


def test_pending_minima_and_maxima(pool):
    assert pool.run(minima, (3,), ranks=3)[0] == []
    assert pool.run(minima, (2, 2), ranks=4)[0] == []


def writes(op):
    """Writes to a tensor with a pending reduction."""
    mesh = cpu_mesh(3)
    layout = Layout(mesh, [Partial(op)])
    plain = torch.arange(6.0, dtype=torch.float64)
    x = distribute(plain, mesh, layout)
    results = []
    for fn in (
        lambda t: t.fill_(5.0),
        lambda t: t.add_(1),
        lambda t: t.mul_(-2.0),
        lambda t: t.copy_(torch.tensor(7.0)),
        lambda t: t.masked_fill_(torch.tensor([True, False] * 3), 4.0),
        lambda t: t.zero_(),
    ):
        fn(x)
        fn(plain)
        results.append(torch.equal(x.full_tensor(), plain) and x._layout is layout)
    return results


def test_writes_to_what_is_pending(pool):
    for op in ("sum", "avg", "min", "max"):
        assert pool.run(writes, op, ranks=3)[0] == [True] * 6, op


def silence():
    mesh = cpu_mesh(3)
    whole = torch.randn(5, 4)
    pending, again = (distribute(whole, mesh, Layout(mesh, [Partial()]), seed=s) for s in (0, 1))
    cut = distribute(whole, mesh, Layout(mesh, [Shard(0)]))
    row = distribute(whole[0], mesh, Layout(mesh, [Replicate()]))
    column = distribute(whole[:, :1], mesh, Layout(mesh, [Shard(1)]))
    with record_comm() as log:
        made = [
            (pending + again) * 3,
            pending * row,
            pending.double().neg(),
            torch.zeros_like(pending),
            functional.gelu(cut + row) * cut,
            torch.where(cut > 0, cut, row),
            pending + row,
            column + column.clone().copy_(column),
        ]
    return len(log.events), [tuple(map(str, t.placements)) for t in made]


def test_what_sends_nothing(pool):
    events, placements = pool.run(silence, ranks=3)[0]
    assert events == 0
    assert placements == [("P",), ("P",), ("P",), ("R",), ("S(0)",), ("S(0)",), ("P",), ("S(1)",)]


def directly(shape, placements):
    """Operators, seen and unseen: a mode, a gradient, autocast and a transform are never passed by."""
    mesh = cpu_mesh(torch.distributed.get_world_size())
    whole = [torch.randn(shape), torch.randn(shape), torch.randn(shape[1], 3)]
    x, y = (distribute_tensor(t, mesh, placements) for t in whole[:2])
    w = distribute_tensor(whole[2], mesh, [Replicate()])
    a, b, c = whole
    wrong = []
    for _ in range(2):  # the second time by the known plan
        pairs = {
            "add": (x + y, a + b),
            "sub": (x - y, a - b),
            "mul": (x * y, a * b),
            "div": (x / y, a / b),
            "mm": (x @ w, a @ c),
            "float": (x * 2.5, a * 2.5),
            "another float": (x * -1.5, a * -1.5),
            "int": (x + 3, a + 3),
            "bool": (x + True, a + True),
            "radd": (1.0 + x, 1.0 + a),
            "rsub": (1.0 - x, 1.0 - a),
            "ints": (x.to(torch.int32) * 2.5, a.to(torch.int32) * 2.5),
            "halves": (x.to(torch.bfloat16) + 1, a.to(torch.bfloat16) + 1),
        }
        for name, (ours, theirs) in pairs.items():
            if ours.dtype is not theirs.dtype or not torch.equal(ours.full_tensor(), theirs):
                wrong.append(name)
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        _ = x + y
    z = x.clone().requires_grad_()
    (z * 2.5 + z * y).sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        low = x @ w
    total = torch.vmap(lambda t: t + t)(x)
    with pytest.raises(LongmeshError):
        _ = x + b
    return (
        wrong,
        "aten.add.Tensor" in seen,
        torch.allclose(z.grad.full_tensor(), 2.5 + b),
        low.dtype is torch.bfloat16,
        torch.equal(total.full_tensor(), a + a),
    )


@pytest.mark.parametrize(("shape", "ranks"), [((8, 5), 1), ((7, 4), 3), ((2, 4), 3)])
def test_operators_run_their_plan_at_once_only_where_nobody_looks(pool, shape, ranks):
    for found in pool.run(directly, shape, [Shard(0)], ranks=ranks):
        assert found == ([], True, True, True, True)


def write(x, y):
    x.mul_(0.5).add_(1).add_(y, alpha=-2.0).lerp_(y, 0.25)
    x.addcmul_(y, y, value=0.3).addcdiv_(y, y.square().add_(1.0).sqrt(), value=-0.5)
    return x


def writes_directly(shape, placements):
    """In-place methods, seen and unseen; their tensors' versions and views notice."""
    mesh = cpu_mesh(torch.distributed.get_world_size())
    a, b = torch.randn(shape), torch.randn(shape)
    x, y = (distribute_tensor(t, mesh, placements) for t in (a, b))
    for _ in range(2):  # the second time by known plans
        write(a, b)
        with torch.no_grad():
            write(x, y)
    seen, version = [], x._version

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with torch.no_grad():
        with Watch():
            x.mul_(1.0)
        x.mul_(1.0)
        p = x.clone().requires_grad_()
    result = p.square().sum()
    with torch.no_grad():
        p.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()
    with torch.no_grad(), pytest.raises(LongmeshError):
        x.add_(b)
    with torch.no_grad():
        moved = x.reshape(-1)  # where it is cut, a copy that writes back to x
        moved.mul_(3.0)
        moved.mul_(2.0)
    return (
        torch.allclose(x.full_tensor(), a * 6.0, rtol=1e-4, atol=1e-5),
        "aten.mul_.Tensor" in seen,
        x._version - version >= 2,
    )


@pytest.mark.parametrize(("shape", "ranks"), [((8, 5), 1), ((7, 4), 3), ((2, 4), 3)])
def test_writes_run_their_plan_at_once_only_where_nobody_looks(pool, shape, ranks):
    for found in pool.run(writes_directly, shape, [Shard(1)], ranks=ranks):
        assert found == (True, True, True)


def pending_times_infinity():
    """Each rank multiplies its term: documented in docs/how-to/move-from-torch.md."""
    mesh = cpu_mesh(2)
    term = torch.tensor([2.0, 1.0]) if mesh.get_local_rank() == 0 else torch.tensor([-1.0, 1.0])
    pending = DTensor.from_local(term, mesh, [Partial()])
    infinities = distribute_tensor(torch.full((2,), float("inf")), mesh, [Replicate()])
    product = (pending * infinities).full_tensor()
    reduced = pending.redistribute(placements=[Replicate()]) * infinities
    return product.isnan().tolist(), reduced.full_tensor().tolist()


def test_a_pending_sum_times_infinity(pool):
    infinity = float("inf")
    assert pool.run(pending_times_infinity, ranks=2) == [([True, False], [infinity, infinity])] * 2
