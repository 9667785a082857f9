"""Reductions over dims: sums, means, extrema, norms, and those that must see a dim whole.

    sum(x, dim=0):   S(0) -> P      each rank sums its rows
                     S(1) -> S(0)   a dim that is kept (and moves up)
                     P -> P         linear

A rank whose part of the reduced dims is empty calls the op on identity elements, so it contributes
nothing and raises what the others raise. A reduction of a tensor that is empty as a whole is left to torch.

Spreads, norms with a root and log-sum-exps over a sharded dim have programs:

    var     mean of the whole first, then the sum of squared deviations: two small all-reduces, stable
    norm    sum of p-th powers over the ranks, then one root
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from longmesh._torch import OpOverload, schema_of
from longmesh.rules.pieces import (
    as_dims,
    reduced_layout,
    reduced_shape,
    sharding_axes,
    stand_in,
    wide_dtype,
)
from longmesh.rules.planned import Planned
from longmesh.rules.rule import (
    AVG,
    MAX,
    MIN,
    PRODUCT,
    AxisRule,
    Fixed,
    LocalView,
    OpCall,
    OutMeta,
    P,
    Rule,
    S,
    arguments_of,
    contiguous,
    line,
    no_lines,
)
from longmesh.rules.writer import Writer
from longmesh.spec import Partial
from longmesh.spec.placement import identity_of


def reduced_dims(call: OpCall) -> tuple[int, ...]:
    """The dims that a reduction removes; all of them where it names none."""
    given = call.get("dim")
    if (
        given is not None
        and not isinstance(given, int)
        and not given
        and str(call.func) in _NOTHING_IS_NOTHING
    ):
        return ()
    if given is None:
        return tuple(range(call.tensors[0].ndim))
    return tuple(d for d in call.dims() if d < call.tensors[0].ndim)


_NOTHING_IS_NOTHING = ("aten.any.dims", "aten.all.dims")


def reduced_meta(call: OpCall) -> tuple[OutMeta, ...]:
    """Dense outputs without the reduced dims, or with ones in their place."""
    dims, keepdim = reduced_dims(call), call.get("keepdim", False)
    shape = [1 if d in dims else n for d, n in enumerate(call.tensors[0].shape) if keepdim or d not in dims]
    return (contiguous(shape),) * call.num_returns


def reduce_lines(
    call: OpCall, pending: Sequence[Partial] = (), through: Sequence[Partial] = ()
) -> list[AxisRule]:
    """Kept dims stay sharded; a reduced dim that is sharded gives `pending` (one per output), if any. `through`:
    pending reductions that the op commutes with."""
    dims, keepdim = reduced_dims(call), call.get("keepdim", False)
    count = len(call.outputs)
    lines: list[AxisRule] = []
    for dim in range(call.tensors[0].ndim):
        if dim not in dims:
            moved = dim if keepdim else dim - sum(d < dim for d in dims)
            lines.append(line([S(dim)], [S(moved)] * count))
        elif pending:
            lines.append(line([S(dim)], pending))
    return lines + [line([p], [p] * count) for p in through if call.tensors[0].dtype is not torch.bool]


def local_count(call: OpCall, view: LocalView) -> tuple[int, int]:
    """Over how many elements this rank reduces, and over how many all of them do."""
    dims = reduced_dims(call)
    return math.prod(view.input_shapes[0][d] for d in dims), math.prod(call.tensors[0].shape[d] for d in dims)


def on_identity(call: OpCall, view: LocalView, value: Any) -> Callable[..., Any] | None:
    """The op on `value`s instead of this rank's empty part; None where there is something to reduce."""
    mine, whole = local_count(call, view)
    if mine or not whole:
        return None
    dims = reduced_dims(call)
    shape = [1 if d in dims else n for d, n in enumerate(view.input_shapes[0])]
    return Fixed(_on_values, (call.func, tuple(shape), value))


def _on_values(
    func: OpOverload, shape: tuple[int, ...], value: Any, /, x: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    return func(x.new_full(shape, value), *args, **kwargs)


def reducing(*pending: Partial, through: Sequence[Partial] = ()) -> Rule:
    """A reduction whose local call knows what to do with nothing (sum, any, count_nonzero)."""
    return Rule(lambda call: reduce_lines(call, pending, through), reduced_meta, reads_sizes=False)


def extremum(pending: Partial) -> Rule:
    """amax, amin, and max, min of everything."""

    def local_op(call: OpCall, view: LocalView) -> Callable[..., Any] | None:
        return on_identity(call, view, identity_of(pending.reduce_op, call.tensors[0].dtype))

    return Rule(lambda call: reduce_lines(call, [pending], [pending]), reduced_meta, local_op=local_op)


def both_extrema(call: OpCall, view: LocalView) -> Callable[..., Any] | None:
    """aminmax: of nothing, each with the identity of its own reduction."""
    if on_identity(call, view, 0) is None:
        return None
    dtype = call.tensors[0].dtype
    low, high = (
        on_identity(call, view, identity_of("min", dtype)),
        on_identity(call, view, identity_of("max", dtype)),
    )
    assert low is not None and high is not None
    return Fixed(_first_and_second, (low, high))


def _first_and_second(low: Callable[..., Any], high: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return low(*args, **kwargs)[0], high(*args, **kwargs)[1]


def part_of_mean(call: OpCall, view: LocalView) -> Callable[..., Any] | None:
    """What this rank adds to the mean of the whole: its own mean, weighted by its share of the elements."""
    mine, whole = local_count(call, view)
    meta = call.tensors[0]
    dtype = call["dtype"] or meta.dtype
    if mine == whole or not (dtype.is_floating_point or dtype.is_complex):
        return None
    if not mine:
        return on_identity(call, view, 0)
    return Fixed(_share_of_mean, (call.func, mine / whole, dtype))


def _share_of_mean(
    func: OpOverload, share: float, dtype: torch.dtype, /, *args: Any, **kwargs: Any
) -> torch.Tensor:
    return (func(*args, **{**kwargs, "dtype": wide_dtype(dtype)}) * share).to(dtype)


def norm_pending(call: OpCall) -> list[Partial]:
    """Norms that are one reduction; the others take a root of a sum, which can't be pending."""
    order = float(call["ord"])
    return {0.0: [P], 1.0: [P], math.inf: [MAX], -math.inf: [MIN]}.get(order, [])


def norm_of_nothing(call: OpCall, view: LocalView) -> Callable[..., Any] | None:
    return on_identity(call, view, math.inf if float(call["ord"]) == -math.inf else 0)


def variance_of_nothing(call: OpCall, view: LocalView) -> Callable[..., Any] | None:
    """Without rows of its own a rank skips the op, which would warn of too few degrees of freedom."""
    if math.prod(view.output_shapes[0]) or math.prod(call.outputs[0].shape) == 0:
        return None
    return Fixed(_no_spread, (view.output_shapes[0], len(call.outputs) == 2))


def _no_spread(shape: tuple[int, ...], has_mean: bool, /, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    spread = x.new_empty(shape, dtype=x.dtype.to_real())
    return (spread, x.new_empty(shape)) if has_mean else spread


# -- over sharded dims, where more than one local call is needed -----------------------------------


def variance(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """var, std, var_mean, std_mean."""
    given = arguments_of(func, args, kwargs)
    x: Planned = given["self"]
    dims = as_dims(given["dim"], x.ndim)
    if not sharding_axes(x.global_layout, dims) or not (x.is_floating_point() or x.is_complex()):
        return p.by_lines(func, args, kwargs)
    correction = 1 if given["correction"] is None else given["correction"]
    dtype, keepdim = x.dtype, given["keepdim"]
    wide = p.reduced(x).to(wide_dtype(dtype))
    mean = p.reduced(wide.mean(dims, keepdim=True))
    distance = wide - mean
    squares = distance.abs().square() if x.is_complex() else distance.square()
    degrees = max(math.prod(x.shape[d] for d in dims) - correction, 0)
    total = squares.sum(dims, keepdim=keepdim)
    # A pending sum must not be divided by zero term by term.
    result = (total if degrees else p.reduced(total)) / degrees
    if schema_of(func).name in ("aten::std", "aten::std_mean"):
        result = result.sqrt()
    result = result.to(dtype.to_real())
    if len(schema_of(func).returns) == 1:
        return result
    mean = mean if keepdim else mean.reshape(reduced_shape(x.shape, dims, False))
    return result, mean.to(dtype)


def vector_norm(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """(sum |x|^p)^(1/p): each rank its own norm to the power p, pending; the root is taken of the whole."""
    given = arguments_of(func, args, kwargs)
    x: Planned = given["self"]
    order = float(given["ord"])
    dims = as_dims(given["dim"], x.ndim)
    if order in (0, 1) or math.isinf(order) or not x.numel() or not sharding_axes(x.global_layout, dims):
        return p.by_lines(func, args, kwargs)
    x = p.reduced(x)
    dtype, keepdim = given["dtype"] or x.dtype, given["keepdim"]
    wide = wide_dtype(dtype)
    shape = reduced_shape(x.shape, dims, keepdim)
    layout = reduced_layout(x.global_layout, dims, keepdim, P)
    powers = p.local(_powers, x, func, order, dims, keepdim, wide)
    total = p.wrap(powers, x, layout=layout, shape=shape, dtype=wide.to_real())
    return p.reduced(total).pow(1 / order).to(dtype.to_real())


def _powers(
    local: torch.Tensor,
    func: OpOverload,
    order: float,
    dims: tuple[int, ...],
    keepdim: bool,
    wide: torch.dtype,
) -> torch.Tensor:
    norm = func(stand_in(local, dims), order, list(dims), keepdim, dtype=wide)
    return norm.pow(order) if math.prod(local.shape[d] for d in dims) else torch.zeros_like(norm)


def log_sum_exp(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The maximum of the whole, then the sum of what is left: two small all-reduces."""
    given = arguments_of(func, args, kwargs)
    x: Planned = given["self"]
    dims = as_dims(given["dim"], x.ndim)
    if not x.numel() or not sharding_axes(x.global_layout, dims) or x.is_complex():
        return p.by_lines(func, args, kwargs)
    dtype = x.dtype if x.is_floating_point() else torch.get_default_dtype()
    wide = p.reduced(x).to(wide_dtype(dtype))
    top = p.reduced(wide.amax(dims, keepdim=True))
    top = top.masked_fill(top.abs() == math.inf, 0.0)
    result = p.reduced((wide - top).exp().sum(dims, keepdim=True)).log() + top
    result = result if given["keepdim"] else result.reshape(reduced_shape(x.shape, dims, False))
    return result.to(dtype)


MEAN = Rule(lambda call: reduce_lines(call, [P], [P, AVG]), reduced_meta, local_op=part_of_mean)
WHOLE = Rule(reduce_lines, reduced_meta)
VARIANCE = Rule(reduce_lines, reduced_meta, local_op=variance_of_nothing, program=variance)

RULES: dict[str, Rule] = {
    **dict.fromkeys(("sum.default", "sum.dim_IntList"), reducing(P, through=[P, AVG])),
    **dict.fromkeys(("nansum.default", "count_nonzero.default", "count_nonzero.dim_IntList"), reducing(P)),
    **dict.fromkeys(("mean.default", "mean.dim"), MEAN),
    **dict.fromkeys(("prod.default", "prod.dim_int"), reducing(PRODUCT, through=[PRODUCT])),
    **dict.fromkeys(("any.default", "any.dim", "any.dims"), reducing(MAX)),
    **dict.fromkeys(("all.default", "all.dim", "all.dims"), reducing(MIN)),
    **dict.fromkeys(("amax.default", "max.default"), extremum(MAX)),
    **dict.fromkeys(("amin.default", "min.default"), extremum(MIN)),
    "aminmax.default": Rule(lambda call: reduce_lines(call, [MIN, MAX]), reduced_meta, local_op=both_extrema),
    "linalg_vector_norm.default": Rule(
        lambda call: reduce_lines(call, norm_pending(call)), reduced_meta, local_op=norm_of_nothing,
        program=vector_norm,
    ),
    "logsumexp.default": Rule(reduce_lines, reduced_meta, program=log_sum_exp),
    **dict.fromkeys(("var.correction", "std.correction", "var_mean.correction", "std_mean.correction"), VARIANCE),
    # The dim is seen whole.
    **dict.fromkeys(
        (
            "median.dim", "nanmedian.dim", "mode.default", "kthvalue.default", "hash_tensor.default",
        ),
        WHOLE,
    ),
    **dict.fromkeys(("median.default", "nanmedian.default"), Rule(no_lines, reduced_meta)),
}  # fmt: skip
