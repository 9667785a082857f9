"""Pooling over a sharded spatial dim: fetch the rows around the border, then pool locally.

Padding of a sharded dim is put there by hand: the smallest number for a maximum, zeros for an average that counts them.
The places that a maximum comes from are numbered in the whole image. Where the last window may hang over the
edge (`ceil_mode`), or an average does not count its padding, spatial dims are gathered by the op's rule.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from longmesh._torch import OpOverload, aten, schema_of
from longmesh.rules.window import Slide, window_size
from longmesh.spec.placement import identity_of
from longmesh.tensor.autograd import gradient_layout
from longmesh.tensor.make_plan import Family
from longmesh.tensor.op_facts import bind
from longmesh.tensor.ops.halo import Border, borders_of, fetch, fetched_shape, padded, send_home
from longmesh.tensor.planned import Planned
from longmesh.tensor.planner import USUAL, Planner


class Pool:
    """One pooling call: how windows slide over the last `n` dims of an image of `shape`, dim by dim."""

    def __init__(self, given: dict[str, Any], shape: Sequence[int], n: int) -> None:
        self.n = n
        kernel = _of_each(given["kernel_size"], n)
        self.kernel = kernel
        self.stride = _of_each(given["stride"] or kernel, n)
        self.padding = _of_each(given["padding"], n)
        self.dilation = _of_each(given.get("dilation", 1), n)
        self.sizes = tuple(shape[-n:])
        self.slides = {
            len(shape) - n + i: Slide(
                self.sizes[i], kernel[i], self.stride[i], self.padding[i], self.dilation[i]
            )
            for i in range(n)
        }
        ways = zip(self.sizes, kernel, self.stride, self.padding, self.dilation, strict=True)
        self.out_shape = (*shape[:-n], *(window_size(*way) for way in ways))

    def inner_padding(self, borders: Sequence[Border]) -> list[int]:
        """What the local call pads: nothing along a sharded dim, where it was done by hand."""
        sharded = [border.dim for border in borders]
        return [0 if dim in sharded else self.padding[i] for i, dim in enumerate(self.slides)]


def _of_each(value: Any, n: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * n if len(values) == 1 else values


def _num_dims(func: OpOverload) -> int:
    return 3 if "pool3d" in schema_of(func).name else 2


def _is_sharded(tensor: Any, n: int) -> bool:
    return isinstance(tensor, Planned) and any(d >= tensor.ndim - n for d in tensor._layout.shard_dims)


def _planned(func: OpOverload, given: dict[str, Any], *names: str) -> Pool | None:
    """The call, if one of the tensors `names` is sharded along a spatial dim and padding may be put there by hand;
    None where the op's rule does it, or torch is to say what is wrong."""
    n, x = _num_dims(func), given["self"]
    counted = given.get("count_include_pad", True) or given.get("divisor_override") is not None
    if given["ceil_mode"] or not (counted or not any(_of_each(given["padding"], n))):
        return None
    if not all(isinstance(given[name], Planned) for name in names) or not x.numel():
        return None
    if not any(_is_sharded(given[name], n) for name in names):
        return None
    pool = Pool(given, x.shape, n)
    reach = [d * (k - 1) + 1 for k, d in zip(pool.kernel, pool.dilation, strict=True)]
    is_valid = all(p <= r // 2 for p, r in zip(pool.padding, reach, strict=True))
    return pool if is_valid and min(pool.out_shape) > 0 else None


# -- maxima ----------------------------------------------------------------------------------------


def max_pool(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """max_pool2d_with_indices, max_pool3d_with_indices."""
    given, n = bind(func, args, kwargs), _num_dims(func)
    pool = _planned(func, given, "self")
    if pool is None:
        return USUAL
    x = p.reduced(given["self"])
    borders = borders_of(pool.slides, x._layout, x._layout, pool.out_shape, p.comm)
    shape = list(map(int, x._layout.local_shape(pool.out_shape, p.comm.coordinate)))
    lowest = identity_of("max", x.dtype)
    shifts = {b.dim - x.ndim + n: b.window.rows[0] - b.window.before for b in borders}

    def run(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        local = padded(rows, borders, value=lowest)
        if 0 in shape:
            return local.new_zeros(shape), local.new_zeros(shape, dtype=torch.int64)
        options = (pool.kernel, pool.stride, pool.inner_padding(borders), pool.dilation, False)
        values, places = func(local, *options)
        return values, _renumbered(places, tuple(local.shape[-n:]), pool.sizes, shifts)

    values, places = p.locals(2, run, fetch(p, x, x.local_shape, x.dtype, borders))
    return p.wrap(values, x, shape=pool.out_shape), p.wrap(places, x, shape=pool.out_shape, dtype=torch.int64)


def _renumbered(
    places: torch.Tensor, before: Sequence[int], after: Sequence[int], shifts: dict[int, int]
) -> torch.Tensor:
    """Flat places in a window of sizes `before`, as flat places in one of sizes `after` that it is shifted in."""
    result = torch.zeros_like(places)
    step = 1
    for dim in reversed(range(len(before))):
        position = places % before[dim] + shifts.get(dim, 0)
        result += position.clamp_(0, after[dim] - 1) * step
        places = places // before[dim]
        step *= after[dim]
    return result


def max_pool_backward(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gradients go to the places that the maxima came from, and then to the ranks that have those."""
    given, n = bind(func, args, kwargs), _num_dims(func)
    pool = _planned(func, given, "grad_output", "self", "indices")
    if pool is None:
        return USUAL

    def run(borders: Sequence[Border], covered: list[int], local: torch.Tensor, where: torch.Tensor) -> Any:
        rows = local.new_zeros(covered)
        if local.numel():
            shifts = {b.dim - rows.ndim + n: -b.window.rows[0] for b in borders}
            flat = _renumbered(where, pool.sizes, tuple(covered[-n:]), shifts)
            rows.flatten(-n).scatter_add_(-1, flat.flatten(-n), local.flatten(-n))
        return rows

    return _backward(p, pool, given, run, "grad_output", "indices")


def _backward(p: Planner, pool: Pool, given: dict[str, Any], run: Callable[..., Any], *names: str) -> Any:
    """The gradient of the image. `run(borders, shape, ...)` makes that of the rows that the rank's windows cover, of
    its parts of the arguments `names`; then each row's goes to the rank that has it.

    It is laid out as the image if that is sharded along a spatial dim, else as the result's gradient.
    """
    grad, x = given["grad_output"], given["self"]
    layout = gradient_layout(x._layout if _is_sharded(x, pool.n) else grad._layout)
    borders = borders_of(pool.slides, layout, layout, pool.out_shape, p.comm)
    own = list(map(int, layout.local_shape(x.shape, p.comm.coordinate)))
    parts = [p.redistribute(given[name], layout) for name in names]
    rows = p.local(functools.partial(run, borders, fetched_shape(own, borders)), *parts)
    return p.wrap(send_home(p, rows, own, grad.dtype, borders), grad, layout=layout, shape=x.shape)


# -- averages --------------------------------------------------------------------------------------


def avg_pool(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """avg_pool2d, avg_pool3d: linear, so a pending sum stays one."""
    given = bind(func, args, kwargs)
    pool = _planned(func, given, "self")
    if pool is None:
        return USUAL
    x = p.linear_or_reduced(given["self"])
    borders = borders_of(pool.slides, x._layout, x._layout, pool.out_shape, p.comm)
    shape = list(map(int, x._layout.local_shape(pool.out_shape, p.comm.coordinate)))
    options = _averaging(pool, borders, (given["count_include_pad"], given["divisor_override"]))

    def run(rows: torch.Tensor) -> torch.Tensor:
        return rows.new_zeros(shape) if 0 in shape else func(padded(rows, borders), *options)

    return p.wrap(p.local(run, fetch(p, x, x.local_shape, x.dtype, borders)), x, shape=pool.out_shape)


def avg_pool_backward(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = bind(func, args, kwargs)
    pool = _planned(func, given, "grad_output", "self")
    if pool is None:
        return USUAL
    counted = given["count_include_pad"], given["divisor_override"]

    def run(borders: Sequence[Border], covered: list[int], local: torch.Tensor) -> torch.Tensor:
        rows = local.new_zeros(covered)
        if not local.numel():
            return rows
        options = _averaging(pool, borders, counted)
        return padded(func(local, padded(rows, borders), *options), borders, sign=-1)

    return _backward(p, pool, given, run, "grad_output")


def _averaging(pool: Pool, borders: Sequence[Border], counted: tuple[bool, int | None]) -> tuple[Any, ...]:
    return pool.kernel, pool.stride, pool.inner_padding(borders), False, *counted


FAMILIES: dict[OpOverload, Family] = {
    **dict.fromkeys((aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default), max_pool),
    **dict.fromkeys(
        (
            aten.max_pool2d_with_indices_backward.default,
            aten.max_pool3d_with_indices_backward.default,
        ),
        max_pool_backward,
    ),
    **dict.fromkeys((aten.avg_pool2d.default, aten.avg_pool3d.default), avg_pool),
    **dict.fromkeys((aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default), avg_pool_backward),
}
