"""The fast path is the executor's plain case written out: whatever runs by it gives what `execute` gives by the same
plan, bit by bit, laid out alike."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from longmesh import DTensor, Partial, Replicate, Shard, distribute_tensor
from longmesh._torch import TorchDispatchMode
from longmesh.rules.tree import map_tensors
from longmesh.tensor import direct
from longmesh.tensor.bound_plan import execute
from longmesh.tensor.dispatch import dispatch
from longmesh.testing import cpu_mesh

aten = torch.ops.aten


def look(value: Any) -> Any:
    """All there is to see of a result."""
    if isinstance(value, (list, tuple)):
        return [look(v) for v in value]
    if not isinstance(value, DTensor):
        return value
    local = value._local_tensor
    notes = (value._lookup is None, value._origin is None, value._reduced is None, value.is_inference())
    face = (type(value), value._tensor_layout, value.shape, value.stride(), value.dtype, value.device, notes)
    return (*face, local.stride(), local.dtype, local.nan_to_num().tolist())


class Compare(TorchDispatchMode):
    """Each op with a plain plan runs by the executor, on copies, and twice as from torch: then its plan is known."""

    def __init__(self) -> None:
        super().__init__()
        self.compared: set[str] = set()
        self.different: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(issubclass(kind, DTensor) for kind in types):
            return func(*args, **kwargs)
        plan = dispatch.plan_of(func, args, kwargs)
        if plan is None or plan.plain is None:
            return func(*args, **kwargs)
        writes = plan.written is not None

        def copies() -> Any:
            return map_tensors(lambda t: aten.clone(t) if writes else t, (args, kwargs))

        by_plan, *fast = (
            execute(plan, func, *copies()),
            dispatch.from_torch(func, (), *copies()),
            dispatch.from_torch(func, (), *copies()),
        )
        self.compared.add(str(func))
        if [look(result) for result in fast] != [look(by_plan)] * 2:
            self.different.append(f"{func} {look(by_plan)} {[look(result) for result in fast]}")
        return func(*args, **kwargs)


def programs(x: Any, y: Any, w: Any) -> list[Any]:
    """Everyday ops, forward and backward: values, views, writes, lists, ops with several results."""
    size, width = x.shape
    made = [
        x + y,
        x * 2.5,
        x - 1,
        x / y,
        x.exp(),
        x > y,
        -x,
        x.abs().sqrt(),
        x.to(torch.float64),
        x.relu(),
        x.clone(),
    ]
    made += [
        x.softmax(-1),
        F.gelu(x),
        F.layer_norm(x, (width,)),
        x.sum(1),
        x.mean(0, keepdim=True),
        x.amax(1),
        x.sum(),
    ]
    made += [
        x.t(),
        x.transpose(0, 1),
        x.unsqueeze(0),
        x[:, 1:3],
        x[:, -2:],
        x.reshape(size, width, 1),
        x.expand(2, size, width),
    ]
    made += [
        torch.cat([x, y], 1),
        torch.stack([x, y]),
        torch.cat([x.detach(), torch.ones(size, width, dtype=torch.int32)], 1),
        x.split(2, 1),
        x @ w,
        torch.addmm(y, x, w),
        x.clamp(-1, 1),
        torch.where(x > 0, x, y),
    ]
    with torch.no_grad():
        z = x.detach().clone()
        z.mul_(2).add_(y, alpha=3).clamp_(-1, 1).zero_()
        torch._foreach_add_([z, z.clone()], [y, y])
        made += torch._foreach_sqrt([x.detach().abs(), y.abs()])
        inside = x.detach().reshape(
            size, width, 1
        )  # sharded between its first and last dim, for one of the layouts
        made += torch._foreach_neg([inside, inside])
        made += torch._foreach_add([inside, inside], [inside, inside])
        with torch.inference_mode():
            made += [(x + y).transpose(0, 1), x.transpose(0, 1), x.unsqueeze(0)]
    (F.linear(x.softmax(-1), w).tanh() * y).sum().backward()
    return made


def compare_programs(mesh_shape: tuple[int, ...], rows: int) -> tuple[list[str], list[str]]:
    mesh = cpu_mesh(*mesh_shape)
    torch.manual_seed(0)
    a, b, c = torch.randn(rows, 5), torch.rand(rows, 5) + 1, torch.randn(5, 5)
    others = [Replicate()] * (mesh.ndim - 1)
    found = Compare()
    for placement in (Shard(0), Shard(1), Replicate()):
        layout = [placement, *others]
        x, y = (distribute_tensor(t, mesh, layout) for t in (a, b))
        w = distribute_tensor(c, mesh, [Replicate(), *others])
        with found:
            programs(x.requires_grad_(), y, w)
    pending = DTensor.from_local(a, mesh, [Partial(), *others])
    with found:
        torch.stack([pending + pending, pending * 3.0, pending.neg(), pending.t().t()]).sum(1)
    return sorted(found.compared), found.different


@pytest.mark.parametrize(("mesh_shape", "rows"), [((3,), 7), ((3,), 2), ((2, 2), 4), ((1,), 4)])
def test_what_is_run_fast_is_what_is_planned(pool, mesh_shape, rows):
    ranks = 4 if len(mesh_shape) > 1 else mesh_shape[0]
    for compared, different in pool.run(compare_programs, mesh_shape, rows, ranks=ranks):
        assert different == []
        assert len(compared) > 40, compared
        assert {
            "aten.add.Tensor",
            "aten.view.default",
            "aten.mul_.Tensor",
            "aten.native_layer_norm.default",
        } <= {*compared}


CALLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "__add__": (aten.add.Tensor, ("y",)),
    "__radd__": (aten.add.Tensor, (2,)),
    "__mul__": (aten.mul.Tensor, (0.5,)),
    "__rmul__": (aten.mul.Tensor, ("y",)),
    "__sub__": (aten.sub.Tensor, ("y",)),
    "__truediv__": (aten.div.Tensor, ("y",)),
    "__matmul__": (aten.mm.default, ("w",)),
    "sqrt": (aten.sqrt.default, ()),
    "sum": (aten.sum.dim_IntList, (1, True)),
    "mean": (aten.mean.dim, (0,)),
    "add_": (aten.add_.Tensor, ("y",)),
    "mul_": (aten.mul_.Tensor, (3.0,)),
    "lerp_": (aten.lerp_.Scalar, ("y", 0.25)),
    "addcmul_": (aten.addcmul_.default, ("y", "y")),
    "addcdiv_": (aten.addcdiv_.default, ("y", "y")),
}


def compare_methods(rows: int) -> list[str]:
    """The names of methods whose second call, by the direct path, differs from the executor."""
    mesh = cpu_mesh(3)
    torch.manual_seed(0)
    different = []
    for placement in (Shard(0), Shard(1), Replicate()):
        x, y = (distribute_tensor(torch.rand(rows, 5) + 1, mesh, [placement]) for _ in range(2))
        known = {"y": y, "w": distribute_tensor(torch.rand(5, 5), mesh, [Replicate()])}
        for name, (op, given) in CALLS.items():
            args = [known.get(a, a) if isinstance(a, str) else a for a in given]
            with torch.no_grad():
                getattr(x.clone(), name)(*args)
                target = x.clone()
                version = target._version
                found = getattr(target, name)(*args)
                planned = [[args[0]], *args[1:]] if name in ("sum", "mean") else args
                copy = x.clone()
                plan = dispatch.plan_of(op, (copy, *planned), {})
                assert plan is not None
                if look(found) != look(execute(plan, op, (copy, *planned), {})):
                    different.append(f"{name} {placement}")
                if name.endswith("_") and not name.startswith("_") and target._version <= version:
                    different.append(f"{name} is not counted")
    return different


@pytest.mark.parametrize("rows", [7, 2])
def test_methods_do_what_is_planned(pool, rows):
    assert CALLS.keys() == direct.METHODS.keys()
    assert pool.run(compare_methods, rows, ranks=3) == [[]] * 3
