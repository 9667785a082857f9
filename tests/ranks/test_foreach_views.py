"""Foreach and fused ops whose lists hold a tensor and views of it: members are written one after the other, as in
plain torch, and each sees what was written before."""

import pytest
import torch

from longmesh import DTensor, Partial, Replicate, Shard, distribute_tensor
from longmesh.testing import cpu_mesh

PLACEMENTS = (Shard(0), Shard(1), Replicate())
NUMBERS = (2.0, 3.0, 0.5, -1.0)
# Name -> arguments beside the first list and one more: a list of tensors that have the shapes of the members.
ARGUMENTS = {
    "add": [(2.0,), (NUMBERS,), "list"],
    "sub": [(2.0,), "list"],
    "mul": [(2.0,), (torch.tensor(3.0),), "list"],
    "div": [(4.0,), "list"],
    "pow": [(2.0,), "list"],
    "maximum": [(0.7,), "list"],
    "minimum": [(0.7,), "list"],
    "clamp_max": [(0.7,)],
    "clamp_min": [(0.7,)],
    "copy": ["list"],
    "lerp": ["weights"],
    "addcmul": ["two", "numbers"],
    "addcdiv": ["two", "numbers"],
}


def in_place_names():
    found = (name.removeprefix("_foreach_") for name in dir(torch) if name.startswith("_foreach_"))
    return sorted(name.removesuffix("_") for name in found if name.endswith("_"))


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def a_tensor_and_a_view(x):
    return x, [x, x[::3]]


def the_view_first(x):
    return x, [x[1:], x]


def a_view_of_a_view(x):
    rest = x[1:]
    return x, [rest[::2], rest, x, rest[0]]


def views_alone(x):
    return x, [x[:4], x[2:], x[0], x[2:, 0]]


def columns(x):
    return x, [x[:, 0], x, x[0]]


def rows(x):  # torch's fused kernels read memory in a row, so views with gaps are wrong there
    rest = x[1:]
    return x, [x, rest, rest[:3], x[0], x[5:]]


LISTS = [a_tensor_and_a_view, the_view_first, a_view_of_a_view, views_alone, columns]


def calls(name, members):
    """Ways to call an op on `members`, each with other tensors made of them before anything is written."""
    spread = [t.detach().clone().abs() + 0.5 for t in members]
    run = getattr(torch, f"_foreach_{name}_")
    for kind in ARGUMENTS.get(name, [()]):
        if kind == "list":
            yield lambda: run(members, spread)
        elif kind == "weights":
            yield lambda: run(members, spread, 0.25)
        elif kind == "two":
            yield lambda: run(members, spread, spread, 0.5)
        elif kind == "numbers":
            yield lambda: run(members, spread, spread, torch.tensor(NUMBERS[: len(members)]))
        else:
            extra = [a[: len(members)] if isinstance(a, tuple) else a for a in kind]
            yield lambda extra=extra: run(members, *extra)


def sweep(shape, mesh_shape, names, lists=LISTS, placements=PLACEMENTS, inference=False):
    mesh = cpu_mesh(*mesh_shape)
    torch.manual_seed(0)
    data = torch.rand(shape, dtype=torch.float64) + 0.25
    wrong = []
    for name in names:
        for make in lists:
            for placement in placements:
                layout = [placement, *[Replicate()] * (mesh.ndim - 1)]
                with torch.inference_mode(inference), torch.no_grad():
                    number = 0
                    while True:
                        found = []
                        for x in (data.clone(), distribute_tensor(data.clone(), mesh, layout)):
                            base, members = make(x)
                            ways = list(calls(name, members))
                            ways[number]()
                            found.append([whole(t) for t in (base, *members)])
                        same = [torch.allclose(a, b, equal_nan=True) for a, b in zip(*found, strict=True)]
                        if not all(same):
                            wrong.append(f"{name} {number} {make.__name__} {placement}: {same}")
                        number += 1
                        if number == len(ways):
                            break
    return wrong


def test_every_op_that_writes_lists(pool):
    names = in_place_names()
    assert {"mul", "copy", "addcdiv", "zero"} <= set(names)
    assert pool.run(sweep, (7, 2), (3,), names, [a_tensor_and_a_view], (Shard(0),), ranks=3) == [[]] * 3


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference"])
def test_views_of_views_and_several(pool, inference):
    names = ["mul", "addcmul"]
    assert pool.run(sweep, (7, 2), (3,), names, inference=inference, ranks=3) == [[]] * 3


def test_on_two_axes(pool):
    assert pool.run(sweep, (5, 3), (2, 2), ["copy"], ranks=4) == [[]] * 4


def fused(shape):
    """An optimizer step on a tensor and views of it, each with states of its own."""
    mesh = cpu_mesh(2)
    torch.manual_seed(0)
    data = torch.randn(shape)
    options = {"lr": 0.1, "weight_decay": 0.1, "eps": 1e-8, "maximize": False}
    adam = {**options, "beta1": 0.9, "beta2": 0.99, "amsgrad": False}
    sgd = {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9, "dampening": 0.0, "nesterov": False}
    wrong = []
    for make in (rows, the_view_first):
        for op in ("adam", "adamw", "sgd", "adagrad", "unscale"):
            found = []
            for x in (data.clone(), distribute_tensor(data.clone(), mesh, [Shard(0)])):
                base, members = make(x)
                grads, first, second = ([t.clone().abs() for t in members] for _ in range(3))
                steps = [torch.tensor(3.0) for _ in members]
                if op == "sgd":
                    last = {"maximize": False, "is_first_step": False}
                    torch._fused_sgd_(members, grads, first, **sgd, **last)
                elif op == "adagrad":
                    torch._fused_adagrad_(members, grads, first, steps, lr_decay=0.0, **options)
                elif op == "unscale":
                    torch._amp_foreach_non_finite_check_and_unscale_(
                        members, torch.zeros(1), torch.full((1,), 0.5)
                    )
                else:
                    step = torch._fused_adam_ if op == "adam" else torch._fused_adamw_
                    step(members, grads, first, second, [], steps, **adam)
                found.append([whole(t) for t in (base, *members, *first)])
            if not all(torch.allclose(a, b) for a, b in zip(*found, strict=True)):
                wrong.append(f"{op} {make.__name__}")
    return wrong


def test_fused_ops(pool):
    assert pool.run(fused, (7, 2), ranks=2) == [[]] * 2


def one_tensor_twice():
    """Members that are redistributed and members that are not, in the order of the list."""
    mesh = cpu_mesh(3)
    data, one, two = torch.arange(7.0), torch.ones(7), torch.full((7,), 2.0)
    wrong = []
    for layouts in ([Shard(0), Replicate()], [Replicate(), Shard(0)], [Partial(), Shard(0)]):
        x = distribute_tensor(data.clone(), mesh, [Shard(0)])
        a, b = (
            distribute_tensor(t, mesh, [Replicate()]).redistribute(placements=[p])
            for t, p in zip((one, two), layouts, strict=True)
        )
        torch._foreach_copy_([x, x], [a, b])
        wrong += [] if torch.equal(x.full_tensor(), two) else [layouts]
        torch._foreach_lerp_([x, x, x], [b, a, b], [0.5, 0.25, 0.5])
        plain = two.clone()
        torch._foreach_lerp_([plain] * 3, [two, one, two], [0.5, 0.25, 0.5])
        wrong += [] if torch.allclose(x.full_tensor(), plain) else [("lerp", layouts)]
    return wrong


def test_one_tensor_twice(pool):
    assert pool.run(one_tensor_twice, ranks=3) == [[]] * 3
