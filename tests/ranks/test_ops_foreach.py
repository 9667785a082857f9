"""Foreach ops on lists of DTensors against plain torch: mixed layouts, shapes, meshes and plain members."""

import random

import torch

from longmesh import DTensor, Partial, Replicate, Shard
from longmesh.comm import record_comm
from longmesh.spec import Layout
from longmesh.testing import cpu_mesh
from support.layouts import random_layout
from support.op_check import distribute

SHAPES = [(9, 5), (1,), (4, 3), (), (0, 2), (7,)]


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def members(seed, positive=False):
    torch.manual_seed(seed)
    made = [torch.randn(shape, dtype=torch.float64) for shape in SHAPES]
    return [t.abs() + 0.5 for t in made] if positive else made


def spread(tensors, mesh, rng, partials, alike_to=None):
    """Each tensor in a layout of its own, or in that of its counterpart."""
    shape = Layout.replicated(mesh).mesh
    layouts = [
        random_layout(rng, shape, t.ndim, partials) if alike_to is None else alike_to[i]._layout
        for i, t in enumerate(tensors)
    ]
    return [distribute(t, mesh, y, seed=i) for i, (t, y) in enumerate(zip(tensors, layouts, strict=True))]


NUMBERS = [1.0, 2.0, 3.0, 0.5, 5.0, 6.0]
THREE = torch.tensor(3.0, dtype=torch.float64)
UNARY = ("exp", "neg", "abs", "sign", "reciprocal", "sigmoid", "zero", "clone")
CASES = {
    "add": [
        lambda f, x, y: f(x, 2.0), lambda f, x, y: f(x, y, alpha=-2), lambda f, x, y: f(x, NUMBERS),
        lambda f, x, y: f(x, THREE),
    ],
    "sub": [lambda f, x, y: f(x, y, alpha=2), lambda f, x, y: f(x, 2.0)],
    "mul": [
        lambda f, x, y: f(x, y), lambda f, x, y: f(x, -2.0), lambda f, x, y: f(x, NUMBERS),
        lambda f, x, y: f(x, THREE),
    ],
    "div": [lambda f, x, y: f(x, y), lambda f, x, y: f(x, 4.0)],
    "addcmul": [
        lambda f, x, y: f(x, y, y, 0.5), lambda f, x, y: f(x, y, x, NUMBERS),
        lambda f, x, y: f(x, y, x, torch.tensor(NUMBERS)),
    ],
    "addcdiv": [lambda f, x, y: f(x, x, y, 0.5)],
    "lerp": [lambda f, x, y: f(x, y, 0.3), lambda f, x, y: f(x, y, y)],
    "maximum": [lambda f, x, y: f(x, y), lambda f, x, y: f(x, 0.1), lambda f, x, y: f(x, NUMBERS)],
    "clamp_max": [lambda f, x, y: f(x, y), lambda f, x, y: f(x, 0.1)],
    "pow": [lambda f, x, y: f(x, 2.0), lambda f, x, y: f(x, [1, 2, 3, 1, 2, 3])],
    "copy": [lambda f, x, y: f(x, y)],
    **{name: [lambda f, x, y: f(x)] for name in UNARY},
}  # fmt: skip


def all_cases(mesh_shape):
    mesh = cpu_mesh(*mesh_shape)
    rng = random.Random(0)
    found = []
    for name, calls in CASES.items():
        for number, call in enumerate(calls):
            for alike in (True, False) if mesh.ndim == 1 else (number % 2 == 0,):
                x, y = members(0), members(1, positive=True)
                dx = spread(x, mesh, rng, ("sum", "avg"))
                dy = spread(y, mesh, rng, ("sum", "avg"), dx if alike else None)
                label = f"{name} {number} {alike}"
                functional = getattr(torch, f"_foreach_{name}", None)
                if functional is not None and name not in ("zero", "copy"):
                    found += different(label, call(functional, dx, dy), call(functional, x, y))
                inplace = getattr(torch, f"_foreach_{name}_", None)
                if inplace is not None:
                    before = [t._layout for t in dx]
                    call(inplace, dx, dy)
                    call(inplace, x, y)
                    found += different(f"{label} in place", dx, x)
                    assert [t._layout for t in dx] == before
    return found


def different(label, got, want):
    return [
        (label, i, str(getattr(g, "_layout", "")))
        for i, (g, w) in enumerate(zip(got, want, strict=True))
        if g.shape != w.shape or not torch.allclose(whole(g), w)
    ]


def test_foreach(pool):
    assert pool.run(all_cases, (3,), ranks=3)[0] == []
    assert pool.run(all_cases, (2, 2), ranks=4)[0] == []


def norms():
    mesh, flat = cpu_mesh(2, 2), cpu_mesh(4)
    rng = random.Random(0)
    found = []
    for order in (2.0, 1.0, 3.0, float("inf"), 0.0):
        for _ in range(3):
            x = [t for t in members(0) if t.numel()]
            x[0][0, 0] = 1e200
            half = len(x) // 2
            parts = (
                spread(x[:half], mesh, rng, ("sum",))
                + spread(x[half:], flat, rng, ("sum",))
                + [torch.ones(3)]
            )
            found += different(
                order, torch._foreach_norm(parts, order), torch._foreach_norm([*x, torch.ones(3)], order)
            )
    x = torch.tensor([1.0, float("nan"), 2.0])
    for order in (2.0, float("inf")):
        (got,) = torch._foreach_norm([distribute(x, flat, Layout(flat, [Shard(0)]))], order)
        found += [] if got.isnan().item() else [f"nan lost by {order}"]
    return found


def test_norms_of_uneven_empty_and_mixed_members(pool):
    assert pool.run(norms, ranks=4) == [[]] * 4


def counted():
    mesh = cpu_mesh(3)
    x = [distribute(torch.randn(5, 2), mesh, Layout(mesh, [Shard(0)])) for _ in range(10)]
    pending = [distribute(torch.randn(5, 2), mesh, Layout(mesh, [Partial()])) for _ in range(10)]
    with record_comm() as silent:
        torch._foreach_mul_(x, 2.0)
        torch._foreach_add_(x, x, alpha=2)
        torch._foreach_mul_(pending, torch.tensor(0.5))
        made = torch._foreach_add(pending, pending)
    with record_comm() as log:
        torch._foreach_norm(x)
    return len(silent.events), len(log.events), [t.placements for t in made] == [(Partial(),)] * 10


def test_one_collective_for_all_norms_and_none_for_what_is_local(pool):
    assert pool.run(counted, ranks=3) == [(0, 1, True)] * 3


def two_meshes():
    world = cpu_mesh(2, 2, names=("dp", "tp"))
    a = distribute(torch.tensor(3.0), world, Layout(world, [Replicate(), Partial()]))
    b = distribute(torch.tensor(4.0), world["tp"], Layout(world["tp"], [Partial()]))
    x = distribute(torch.arange(5.0), world, Layout(world, [Shard(0), Replicate()]))
    stacked = torch.stack([a, b])
    return stacked.full_tensor().tolist(), (x * b).full_tensor().tolist(), (a + b).item()


def test_scalars_of_another_mesh_are_numbers(pool):
    assert pool.run(two_meshes, ranks=4) == [([3.0, 4.0], [0.0, 4.0, 8.0, 12.0, 16.0], 7.0)] * 4
