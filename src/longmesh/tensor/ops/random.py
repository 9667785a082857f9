"""Random ops whose result does not depend on the layout.

Each rank makes its own part of the global random tensor (`tensor/random.py`). Tensors that give parameters
are taken where they lie, pending reductions carried out first. The few distributions that need rejection
sampling run whole on every rank, from one seed, so they agree too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from longmesh.comm import comm_of
from longmesh.comm.local import identity_of
from longmesh.errors import LongmeshError
from longmesh.spec import Layout, Partial
from longmesh.tensor import distributions
from longmesh.tensor.autograd import gradient_layout, move
from longmesh.tensor.dispatch import Handler
from longmesh.tensor.distributions import Distribution
from longmesh.tensor.dtensor import DTensor
from longmesh.tensor.meta import contiguous_stride, global_stride
from longmesh.tensor.ops.pieces import bind, reduced
from longmesh.tensor.philox import Key
from longmesh.tensor.plain import first_mesh, replicate_plain
from longmesh.tensor.random import keeps_value, next_key, sample, std_of_parts
from longmesh.tensor.tree import map_tensors

aten = torch.ops.aten

Arguments = dict[str, Any]
Maker = Callable[[torch.dtype, Arguments], Distribution]


def draw_like(
    like: DTensor,
    distribution: Distribution,
    key: Key | None,
    *,
    dtype: torch.dtype | None = None,
    layout: Layout | None = None,
) -> DTensor:
    """A random DTensor that lies as `like` does (replicated where that is pending). Sends nothing."""
    layout = gradient_layout(like._layout) if layout is None else layout
    kind = like.dtype if dtype is None else dtype
    where = comm_of(like._mesh).coordinate
    local = sample(distribution, key, layout, like.shape, where, kind, like._local_tensor.device)
    if local.shape == like._local_tensor.shape and not like._local_tensor.is_contiguous():
        local = torch.empty_like(like._local_tensor, dtype=kind).copy_(local)
        return DTensor(local, like._mesh, layout, like.shape, global_stride(like.shape, local))
    return DTensor(local, like._mesh, layout, like.shape, contiguous_stride(like.shape))


# -- filled from numbers ---------------------------------------------------------------------------


def _integers(dtype: torch.dtype, a: Arguments) -> Distribution:
    low, high = a.get("from", 0), a.get("to")
    if "to" not in a or (high is None and "from" not in a):
        return distributions.integers_of(dtype)
    if high is None:
        return distributions.integers(low, distributions.largest_integer(dtype) + 1)
    return distributions.integers(low, high)


FILLS: dict[str, Maker] = {
    "uniform": lambda d, a: distributions.uniform(_part(d), a["from"], a["to"]),
    "normal": lambda d, a: distributions.normal(_part(d), a["mean"], std_of_parts(d, a["std"])),
    "normal_functional": lambda d, a: distributions.normal(_part(d), a["mean"], std_of_parts(d, a["std"])),
    "log_normal": lambda d, a: distributions.log_normal(d, a["mean"], a["std"]),
    "exponential": lambda d, a: distributions.exponential(d, a["lambd"]),
    "geometric": lambda d, a: distributions.geometric(a["p"]),
    "cauchy": lambda d, a: distributions.cauchy(d, a["median"], a["sigma"]),
    "bernoulli": lambda d, a: distributions.bernoulli(a["p"]),
    "random": _integers,
    "rand_like": lambda d, a: distributions.uniform(_part(d)),
    "randn_like": lambda d, a: distributions.normal(_part(d), 0.0, std_of_parts(d, 1.0)),
    "randint_like": lambda d, a: distributions.integers(int(a.get("low", 0)), int(a["high"])),
}


def _part(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def fill(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In place (uniform_) or new (uniform, rand_like): every element from the op's numbers alone."""
    given = bind(func, args, kwargs)
    target: DTensor = given["self"]
    name = func._schema.name.removeprefix("aten::")
    dtype = given.get("dtype") or target.dtype
    distribution = FILLS[name.removesuffix("_")](dtype, given)
    key = next_key(given.get("generator"))
    if not name.endswith("_"):
        return draw_like(target, distribution, key, dtype=dtype)
    return overwrite(target, draw_like(target, distribution, key))


def overwrite(target: DTensor, value: Any) -> DTensor:
    """Write a value to a tensor in place; terms of a pending reduction are made so that it holds the value."""
    where = comm_of(target._mesh).coordinate
    value = move(value, gradient_layout(target._layout))
    if keeps_value(target._layout, where):
        target._local_tensor.copy_(value._local_tensor)
    else:
        pending = target._layout.placements[target._layout.partial_axes[0]]
        assert isinstance(pending, Partial)
        target._local_tensor.fill_(identity_of(pending.reduce_op, target.dtype))
    return target


# -- with tensors as parameters --------------------------------------------------------------------


def bernoulli_from_self(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """bernoulli(p): every element its own probability."""
    p = reduced(args[0])
    key = next_key(kwargs.get("generator"))
    unit = draw_like(p, _fine_unit(p.dtype), key, dtype=_fine(p.dtype))
    local = (unit._local_tensor < p._local_tensor).to(p.dtype)
    return DTensor(local, p._mesh, p._layout, p.shape, global_stride(p.shape, local))


def bernoulli_from_tensor(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """bernoulli(self, p) and bernoulli_(p) with a tensor of probabilities, broadcast to self."""
    target, p = args[0], _on_mesh(args[1], args[0])
    kind = _fine(p.dtype)
    unit = draw_like(target, _fine_unit(p.dtype), next_key(kwargs.get("generator")), dtype=kind)
    value = torch.lt(unit, p).to(target.dtype)
    return overwrite(target, value) if func is aten.bernoulli_.Tensor else value


def _fine(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _fine_unit(dtype: torch.dtype) -> Distribution:
    return distributions.uniform(_fine(dtype))


def normal_from_tensors(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """normal(mean, std) with tensors: mean + std * z."""
    given = bind(func, args, kwargs)
    args, _ = replicate_plain(func, (given["mean"], given["std"]), {})
    mean, std = args
    tensors = [reduced(t) for t in args if isinstance(t, DTensor)]
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    like: Any = next((t for t in tensors if t.shape == shape), None)
    like = tensors[0].expand(shape) if like is None else like
    z = draw_like(like, distributions.normal(like.dtype), next_key(given.get("generator")))
    return z * std + mean


def _on_mesh(tensor: torch.Tensor, like: DTensor) -> DTensor:
    if isinstance(tensor, DTensor):
        return reduced(tensor)
    whole = Layout.replicated(like._layout.mesh)
    return DTensor(tensor, like._mesh, whole, tensor.shape, tensor.stride())


def multinomial(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Rows may be cut; a row's weights come together. With replacement by the inverse of the cumulated
    weights, without by the order in which exponential clocks ring."""
    given = bind(func, args, kwargs)
    weights, count = given["self"], given["num_samples"]
    classes = weights.shape[-1] if weights.ndim else 0
    if weights.ndim not in (1, 2) or count < 1 or (not given["replacement"] and count > classes):
        raise LongmeshError(
            f"multinomial of {count} samples (replacement={given['replacement']}) from weights of shape "
            f"{tuple(weights.shape)}: give 1 or 2 dims, and without replacement at most as many as there are"
        )
    layout = gradient_layout(weights._layout)
    for axis in layout.cuts(weights.ndim - 1):
        layout = layout.with_placement(axis, Layout.replicated(layout.mesh).placements[axis])
    weights = move(weights, layout)
    local, key = weights._local_tensor, next_key(given["generator"])
    shape = (*weights.shape[:-1], count)
    if given["replacement"]:
        like = DTensor(
            local.new_empty((*local.shape[:-1], count)),
            weights._mesh,
            layout,
            shape,
            contiguous_stride(shape),
        )
        unit = draw_like(like, distributions.uniform(torch.float64), key, dtype=torch.float64)._local_tensor
        rising = local.double().cumsum(-1)
        found = torch.searchsorted(rising, unit * rising[..., -1:], right=True)
        last = (local > 0).long().mul(torch.arange(1, classes + 1, device=local.device)).amax(
            -1, keepdim=True
        ) - 1
        indices = torch.minimum(found, last)
    else:
        clocks = draw_like(weights, distributions.exponential(torch.float64), key, dtype=torch.float64)
        indices = (local.double() / clocks._local_tensor).topk(count, dim=-1).indices
    return DTensor(indices.contiguous(), weights._mesh, layout, shape, contiguous_stride(shape))


# -- no conversion of a fixed number of bits: whole on every rank, from one seed ---------------------------


def seeded(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gather the inputs and let torch draw, on every rank from the same seed."""
    mesh = first_mesh(args, kwargs)
    whole = Layout.replicated(mesh)
    given = kwargs.get("generator") or next((a for a in args if isinstance(a, torch.Generator)), None)
    key = next_key(given)
    if key is None:
        raise LongmeshError(
            f"{func} in a traced program would repeat what it drew while tracing; run it outside"
        )

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        return move(tensor, whole)._local_tensor if isinstance(tensor, DTensor) else tensor

    local_args, local_kwargs = map_tensors(gather, (args, kwargs))
    device = next(a.device for a in (*args, *kwargs.values()) if isinstance(a, DTensor))
    generator = torch.Generator(device).manual_seed((key[0] + key[1] * 0x9E3779B97F4A7C15) % 2**63)
    names = [argument.name for argument in func._schema.arguments]
    local_args = tuple(a for n, a in zip(names, local_args, strict=False) if n != "generator")
    local_kwargs["generator"] = generator
    result = func(*local_args, **local_kwargs)
    return map_tensors(lambda t: DTensor(t, mesh, whole, t.shape, t.stride()), result)


def _overloads(*names: str) -> list[OpOverload]:
    found: list[OpOverload] = []
    for name in names:
        packet, _, overload = name.partition(".")
        found.append(getattr(getattr(aten, packet), overload or "default"))
    return found


HANDLERS: dict[OpOverload, Handler] = {
    **dict.fromkeys(
        _overloads(
            "uniform_", "normal_", "log_normal_", "exponential_", "geometric_", "cauchy_", "bernoulli_.float",
            "random_", "random_.from", "random_.to", "uniform", "normal_functional", "log_normal", "exponential",
            "geometric", "cauchy", "bernoulli.p", "random", "random.from", "random.to", "rand_like", "randn_like",
            "rand_like.generator", "randn_like.generator", "randint_like", "randint_like.generator",
            "randint_like.low_dtype", "randint_like.low_generator_dtype", "randint_like.Tensor",
            "randint_like.Tensor_generator",
        ),
        fill,
    ),
    aten.bernoulli.default: bernoulli_from_self,
    aten.bernoulli.Tensor: bernoulli_from_tensor,
    aten.bernoulli_.Tensor: bernoulli_from_tensor,
    aten.normal.Tensor_Tensor: normal_from_tensors,
    aten.normal.Tensor_float: normal_from_tensors,
    aten.normal.float_Tensor: normal_from_tensors,
    aten.multinomial.default: multinomial,
    **dict.fromkeys(_overloads("poisson", "binomial", "_standard_gamma", "_sample_dirichlet"), seeded),
}  # fmt: skip
