"""Random ops whose result does not depend on the layout.

Each rank makes its own part of the global random tensor (`tensor/random.py`). Tensors that give parameters
are taken as they are laid out, pending reductions carried out first. The few distributions that need rejection
sampling run whole on every rank, from one seed, so they agree too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from longmesh._torch import OpOverload, aten, schema_of
from longmesh.errors import LongmeshError
from longmesh.spec import Partial
from longmesh.spec.placement import identity_of
from longmesh.tensor import distributions
from longmesh.tensor.autograd import gradient_layout
from longmesh.tensor.distributions import Distribution
from longmesh.tensor.make_plan import Family
from longmesh.tensor.op_facts import bind
from longmesh.tensor.planned import Planned
from longmesh.tensor.planner import Planner
from longmesh.tensor.random import Drawing, keeps_value, next_key, sample, std_of_parts

Arguments = dict[str, Any]
Maker = Callable[[torch.dtype, Arguments], Distribution]


def draw_like(
    p: Planner,
    like: Planned,
    distribution: Distribution,
    generator: torch.Generator | None = None,
    *,
    dtype: torch.dtype | None = None,
    shape: tuple[int, ...] | None = None,
) -> Planned:
    """A random tensor that is laid out as `like` (replicated where that is pending). Sends nothing. The key of its
    numbers is taken when it is drawn."""
    layout = gradient_layout(like._layout)
    kind = like.dtype if dtype is None else dtype
    size = tuple(like.shape) if shape is None else shape
    where, device = like._tensor_layout.comm.coordinate, p.device

    def draw(local: torch.Tensor) -> torch.Tensor:
        drawn = sample(distribution, next_key(generator), layout, size, where, kind, device)
        if drawn.shape == local.shape and not local.is_contiguous():
            return torch.empty_like(local, dtype=kind).copy_(drawn)
        return drawn

    return p.wrap(p.local(Drawing(draw, generator), like), like, layout=layout, shape=size, dtype=kind)


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


def fill(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In place (uniform_) or new (uniform, rand_like): every element from the op's numbers alone."""
    given = bind(func, args, kwargs)
    target: Planned = given["self"]
    name = schema_of(func).name.removeprefix("aten::")
    dtype = given.get("dtype") or target.dtype
    if any(isinstance(value, Planned) for key, value in given.items() if key != "self"):
        return p.one_by_one(func, _with_numbers)
    distribution = FILLS[name.removesuffix("_")](dtype, given)
    if not name.endswith("_"):
        return draw_like(p, target, distribution, given.get("generator"), dtype=dtype)
    return overwrite(p, target, draw_like(p, target, distribution, given.get("generator")))


def _with_numbers(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """randint_like with a tensor as its bound: its value is read first."""
    given = {name: value for name, value in bind(func, args, kwargs).items() if name != "self"}
    numbers = {k: v.item() if isinstance(v, torch.Tensor) else v for k, v in given.items() if v is not None}
    generator = numbers.pop("generator", None)
    target, high = args[0], int(numbers.pop("high"))
    if generator is not None:
        return aten.randint_like.generator(target, high, generator=generator, **numbers)
    return aten.randint_like.default(target, high, **numbers)


def overwrite(p: Planner, target: Planned, value: Any) -> Planned:
    """Write a value to a tensor in place; terms of a pending reduction are made so that it has the value."""
    layout = target._layout
    value = p.redistribute(value, gradient_layout(layout))
    if keeps_value(layout, target._tensor_layout.comm.coordinate):
        p.local(torch.Tensor.copy_, target, value)
    else:
        pending = layout.placements[layout.partial_axes[0]]
        assert isinstance(pending, Partial)
        p.local(torch.Tensor.fill_, target, identity_of(pending.reduce_op, target.dtype))
    return target


# -- with tensors as parameters --------------------------------------------------------------------


def bernoulli_from_self(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """bernoulli(p): every element its own probability."""
    odds = p.reduced(args[0])
    unit = draw_like(p, odds, _fine_unit(odds.dtype), kwargs.get("generator"), dtype=_fine(odds.dtype))
    return torch.lt(unit, odds).to(odds.dtype)


def bernoulli_from_tensor(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """bernoulli(self, p) and bernoulli_(p) with a tensor of probabilities, broadcast to self."""
    target, odds = args[0], p.reduced(args[1])
    generator = bind(func, args, kwargs)["generator"]
    unit = draw_like(p, target, _fine_unit(odds.dtype), generator, dtype=_fine(odds.dtype))
    value = torch.lt(unit, odds).to(target.dtype)
    return overwrite(p, target, value) if func is aten.bernoulli_.Tensor else value


def _fine(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _fine_unit(dtype: torch.dtype) -> Distribution:
    return distributions.uniform(_fine(dtype))


def normal_from_tensors(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """normal(mean, std) with tensors: mean + std * z."""
    given = bind(func, args, kwargs)
    mean, std = given["mean"], given["std"]
    tensors: list[Any] = [p.reduced(t) for t in (mean, std) if isinstance(t, Planned)]
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    like: Any = next((t for t in tensors if t.shape == shape), None)
    like = tensors[0].expand(shape) if like is None else like
    return draw_like(p, like, distributions.normal(like.dtype), given.get("generator")) * std + mean


def multinomial(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows may be sharded; a row's weights come together. With replacement by the inverse of the cumulated
    weights, without by the order in which exponential clocks ring."""
    given = bind(func, args, kwargs)
    weights, count, generator = given["self"], given["num_samples"], given["generator"]
    classes = weights.shape[-1] if weights.ndim else 0
    if weights.ndim not in (1, 2) or count < 1 or (not given["replacement"] and count > classes):
        raise LongmeshError(
            f"multinomial of {count} samples (replacement={given['replacement']}) from weights of shape "
            f"{tuple(weights.shape)}: give 1 or 2 dims, and without replacement at most as many as there are"
        )
    layout = gradient_layout(weights._layout)
    weights = p.redistribute(weights, layout.with_replicated(layout.shard_axes(weights.ndim - 1)))
    shape = (*weights.shape[:-1], count)
    if given["replacement"]:
        uniform = distributions.uniform(torch.float64)
        unit = draw_like(p, weights, uniform, generator, dtype=torch.float64, shape=shape)
        indices = p.local(_by_inverse, weights, unit)
    else:
        exponential = distributions.exponential(torch.float64)
        clocks = draw_like(p, weights, exponential, generator, dtype=torch.float64)
        indices = p.local(lambda w, c: (w.double() / c).topk(count, dim=-1).indices, weights, clocks)
    return p.wrap(indices, weights, shape=shape, dtype=torch.int64)


def _by_inverse(local: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    rising = local.double().cumsum(-1)
    found = torch.searchsorted(rising, unit * rising[..., -1:], right=True)
    numbers = torch.arange(1, local.shape[-1] + 1, device=local.device)
    last = (local > 0).long().mul(numbers).amax(-1, keepdim=True) - 1
    return torch.minimum(found, last).contiguous()


# -- no conversion of a fixed number of bits: whole on every rank, from one seed ---------------------------


def seeded(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gather the inputs and let torch draw, on every rank from the same seed."""
    given = bind(func, args, kwargs)
    generator, device = given.pop("generator", None), p.device

    def draw(*args: Any, **kwargs: Any) -> Any:
        key = next_key(generator)
        if key is None:
            raise LongmeshError(
                f"{func} in a traced program would repeat the numbers drawn while tracing; call it outside"
            )
        seed = (key[0] + key[1] * 0x9E3779B97F4A7C15) % 2**63
        return func(*args, **kwargs, generator=torch.Generator(device).manual_seed(seed))

    return p.on_whole_tensors(Drawing(draw, generator), tuple(given.values()), {})


def _overloads(*names: str) -> list[OpOverload]:
    found: list[OpOverload] = []
    for name in names:
        packet, _, overload = name.partition(".")
        found.append(getattr(getattr(aten, packet), overload or "default"))
    return found


FAMILIES: dict[OpOverload, Family] = {
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
