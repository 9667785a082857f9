"""Random ops whose result does not depend on the layout.

Each rank makes its own part of the global random tensor (the executor "draw"). Tensors that give parameters are taken
as they are laid out, pending reductions carried out first. The few distributions that need rejection sampling run
whole on every rank, from one seed, so they agree too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from longmesh._torch import OpOverload, aten, schema_of
from longmesh.errors import LongmeshError
from longmesh.rules.pieces import without_pending
from longmesh.rules.planned import Planned
from longmesh.rules.pointwise import broadcast
from longmesh.rules.rule import Rule, arguments_of
from longmesh.rules.steps import DrawOptions
from longmesh.rules.writer import Writer
from longmesh.spec import Coordinate, Layout, Partial
from longmesh.spec.placement import identity_of

Arguments = dict[str, Any]
Distribution = tuple[str, tuple[Any, ...]]
"""The name of what makes it (tensor/distributions.py), and its arguments."""
Maker = Callable[[torch.dtype, Arguments], Distribution]


def draw_like(
    p: Writer,
    like: Planned,
    distribution: Distribution,
    generator: torch.Generator | None = None,
    *,
    dtype: torch.dtype | None = None,
    shape: tuple[int, ...] | None = None,
) -> Planned:
    """A random tensor that is laid out as `like` (replicated where that is pending). Sends nothing."""
    layout = without_pending(like.global_layout)
    kind = like.dtype if dtype is None else dtype
    size = tuple(like.shape) if shape is None else shape
    options = DrawOptions(*distribution, layout, size, kind, generator)
    return p.wrap(p.execute(None, "draw", options, like), like, layout=layout, shape=size, dtype=kind)


# -- filled from numbers ---------------------------------------------------------------------------


def _uniform(dtype: torch.dtype, a: Arguments) -> Distribution:
    return "uniform", (_part(dtype), a.get("from", 0.0), a.get("to", 1.0))


def _normal(dtype: torch.dtype, a: Arguments) -> Distribution:
    return "normal", (_part(dtype), a.get("mean", 0.0), std_of_parts(dtype, a.get("std", 1.0)))


def std_of_parts(dtype: torch.dtype, std: float) -> float:
    """The deviation of real and imaginary parts that together have `std`."""
    return std * math.sqrt(0.5) if dtype.is_complex else std


def _part(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _integers(dtype: torch.dtype, a: Arguments) -> Distribution:
    low, high = a.get("from", 0), a.get("to")
    if "to" not in a or (high is None and "from" not in a):
        return "integers_of", (dtype,)
    return ("integers_from", (low, dtype)) if high is None else ("integers", (low, high))


FILLS: dict[str, Maker] = {
    "uniform": _uniform,
    "normal": _normal,
    "normal_functional": _normal,
    "log_normal": lambda d, a: ("log_normal", (d, a["mean"], a["std"])),
    "exponential": lambda d, a: ("exponential", (d, a["lambd"])),
    "geometric": lambda d, a: ("geometric", (a["p"],)),
    "cauchy": lambda d, a: ("cauchy", (d, a["median"], a["sigma"])),
    "bernoulli": lambda d, a: ("bernoulli", (a["p"],)),
    "random": _integers,
    "rand_like": _uniform,
    "randn_like": _normal,
    "randint_like": lambda d, a: ("integers", (int(a.get("low", 0)), int(a["high"]))),
}


def fill(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In place (uniform_) or new (uniform, rand_like): every element from the op's numbers alone."""
    given = arguments_of(func, args, kwargs)
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
    given = {name: value for name, value in arguments_of(func, args, kwargs).items() if name != "self"}
    numbers = {k: v.item() if isinstance(v, torch.Tensor) else v for k, v in given.items() if v is not None}
    generator = numbers.pop("generator", None)
    target, high = args[0], int(numbers.pop("high"))
    if generator is not None:
        return aten.randint_like.generator(target, high, generator=generator, **numbers)
    return aten.randint_like.default(target, high, **numbers)


def overwrite(p: Writer, target: Planned, value: Any) -> Planned:
    """Write a value to a tensor in place; terms of a pending reduction are made so that it has the value."""
    layout = target.global_layout
    value = p.redistribute(value, without_pending(layout))
    if keeps_value(layout, target.coordinate):
        p.local(torch.Tensor.copy_, target, value)
    else:
        pending = layout.placements[layout.partial_axes[0]]
        assert isinstance(pending, Partial)
        p.local(torch.Tensor.fill_, target, identity_of(pending.reduce_op, target.dtype))
    return target


def keeps_value(layout: Layout, coordinate: Coordinate) -> bool:
    """Whether this rank's term of a pending reduction is the value itself; else it is the identity."""
    return not any(
        isinstance(p, Partial) and p.reduce_op in ("sum", "product") and coordinate[a] > 0
        for a, p in enumerate(layout.placements)
    )


# -- with tensors as parameters --------------------------------------------------------------------


def bernoulli_from_self(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """bernoulli(p): every element its own probability."""
    odds = p.reduced(args[0])
    unit = draw_like(p, odds, _fine_unit(odds.dtype), kwargs.get("generator"), dtype=_fine(odds.dtype))
    return torch.lt(unit, odds).to(odds.dtype)


def bernoulli_from_tensor(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """bernoulli(self, p) and bernoulli_(p) with a tensor of probabilities, broadcast to self."""
    target, odds = args[0], p.reduced(args[1])
    generator = arguments_of(func, args, kwargs)["generator"]
    unit = draw_like(p, target, _fine_unit(odds.dtype), generator, dtype=_fine(odds.dtype))
    value = torch.lt(unit, odds).to(target.dtype)
    return overwrite(p, target, value) if func is aten.bernoulli_.Tensor else value


def _fine(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _fine_unit(dtype: torch.dtype) -> Distribution:
    return "uniform", (_fine(dtype),)


def normal_from_tensors(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """normal(mean, std) with tensors: mean + std * z."""
    given = arguments_of(func, args, kwargs)
    mean, std = given["mean"], given["std"]
    tensors: list[Any] = [p.reduced(t) for t in (mean, std) if isinstance(t, Planned)]
    shape = broadcast([tuple(t.shape) for t in tensors])
    like: Any = next((t for t in tensors if t.shape == shape), None)
    like = tensors[0].expand(shape) if like is None else like
    return draw_like(p, like, ("normal", (like.dtype,)), given.get("generator")) * std + mean


def multinomial(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows may be sharded; a row's weights come together. With replacement by the inverse of the cumulated
    weights, without by the order in which exponential clocks ring."""
    given = arguments_of(func, args, kwargs)
    weights, count, generator = given["self"], given["num_samples"], given["generator"]
    classes = weights.shape[-1] if weights.ndim else 0
    if weights.ndim not in (1, 2) or count < 1 or (not given["replacement"] and count > classes):
        raise LongmeshError(
            f"multinomial of {count} samples (replacement={given['replacement']}) from weights of shape "
            f"{tuple(weights.shape)}: give 1 or 2 dims, and without replacement at most as many as there are"
        )
    layout = without_pending(weights.global_layout)
    weights = p.redistribute(weights, layout.with_replicated(layout.shard_axes(weights.ndim - 1)))
    shape = (*weights.shape[:-1], count)
    if given["replacement"]:
        uniform = ("uniform", (torch.float64,))
        unit = draw_like(p, weights, uniform, generator, dtype=torch.float64, shape=shape)
        indices = p.local(_by_inverse, weights, unit)
    else:
        exponential = ("exponential", (torch.float64,))
        clocks = draw_like(p, weights, exponential, generator, dtype=torch.float64)
        indices = p.local(_by_clocks, weights, clocks, count)
    return p.wrap(indices, weights, shape=shape, dtype=torch.int64)


def _by_clocks(local: torch.Tensor, clocks: torch.Tensor, count: int) -> torch.Tensor:
    return (local.double() / clocks).topk(count, dim=-1).indices


def _by_inverse(local: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    rising = local.double().cumsum(-1)
    found = torch.searchsorted(rising, unit * rising[..., -1:], right=True)
    numbers = torch.arange(1, local.shape[-1] + 1, device=local.device)
    last = (local > 0).long().mul(numbers).amax(-1, keepdim=True) - 1
    return torch.minimum(found, last).contiguous()


# -- no conversion of a fixed number of bits: whole on every rank, from one seed ---------------------------


def seeded(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gather the inputs and let torch draw, on every rank from the same seed."""
    given = arguments_of(func, args, kwargs)
    generator = given.pop("generator", None)
    whole = [p.replicated(value) if isinstance(value, Planned) else value for value in given.values()]
    return p.whole(p.execute(None, "draw_whole", (func, generator), *whole))


# -- dropout and its kin: random and differentiable ------------------------------------------------


def native_dropout(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Linear in its input, so a pending sum stays pending under the mask."""
    given = arguments_of(func, args, kwargs)
    x, odds, train = given["input"], given["p"], given["train"]
    linear = all(q.reduce_op in ("sum", "avg") for q in x.global_layout.placements if isinstance(q, Partial))
    x = x if linear else p.reduced(x)
    keep = 1.0 if train is False else 1.0 - odds
    mask = draw_like(p, x, ("bernoulli", (keep,)), dtype=torch.bool)
    return p.wrap(p.local(_masked, x, mask, 0.0 if keep == 0 else 1.0 / keep), x), mask


def _masked(local: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    return local * mask * scale


def rrelu_with_noise(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A random slope for each negative element, kept in `noise` for the backward."""
    given = arguments_of(func, args, kwargs)
    x, lower, upper = given["self"], float(given["lower"]), float(given["upper"])
    if not given["training"]:
        out = torch.nn.functional.leaky_relu(x, (lower + upper) / 2)
    else:
        slope = draw_like(p, x, ("uniform", (x.dtype, lower, upper)), given["generator"])
        noise = torch.where(x <= 0, slope, torch.ones_like(slope))
        overwrite(p, given["noise"], noise)
        out = x * noise
    return overwrite(p, x, out) if func is aten.rrelu_with_noise_.default else out


_FILLED = (
    "uniform_", "normal_", "log_normal_", "exponential_", "geometric_", "cauchy_", "bernoulli_.float",
    "random_", "random_.from", "random_.to", "uniform", "normal_functional", "log_normal", "exponential",
    "geometric", "cauchy", "bernoulli.p", "random", "random.from", "random.to", "rand_like", "randn_like",
    "rand_like.generator", "randn_like.generator", "randint_like", "randint_like.generator",
    "randint_like.low_dtype", "randint_like.low_generator_dtype", "randint_like.Tensor",
    "randint_like.Tensor_generator",
)  # fmt: skip
_SEEDED = ("poisson", "binomial", "_standard_gamma", "_sample_dirichlet")


def _full_name(name: str) -> str:
    return name if "." in name else f"{name}.default"


RULES: dict[str, Rule] = {
    **{_full_name(name): Rule(program=fill) for name in _FILLED},
    "bernoulli.default": Rule(program=bernoulli_from_self),
    **dict.fromkeys(("bernoulli.Tensor", "bernoulli_.Tensor"), Rule(program=bernoulli_from_tensor)),
    **{
        f"normal.{overload}": Rule(program=normal_from_tensors)
        for overload in ("Tensor_Tensor", "Tensor_float", "float_Tensor")
    },
    "multinomial.default": Rule(program=multinomial),
    **{_full_name(name): Rule(program=seeded) for name in _SEEDED},
    "native_dropout.default": Rule(program=native_dropout),
    **{
        f"{name}.default": Rule(program=rrelu_with_noise)
        for name in ("rrelu_with_noise", "rrelu_with_noise_")
    },
}
