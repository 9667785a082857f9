"""Pooling: batch and channel dims may be sharded, and spatial dims where windows are simple.

The program for a sharded spatial dim fetches the rows around the border, then pools locally. Padding of a sharded dim
is put there by hand: the smallest number for a maximum, zeros for an average that counts them. The places that a
maximum comes from are numbered in the whole image. Where the last window may hang over the edge (`ceil_mode`), or an
average does not count its padding, spatial dims are gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from longmesh._torch import OpOverload, schema_of
from longmesh.rules.batched import batched, op_on_nothing
from longmesh.rules.halo import Border, Pads, borders_of, fetch, fetched_shape, padded, pads_of, send_home
from longmesh.rules.pieces import without_pending
from longmesh.rules.planned import Planned
from longmesh.rules.rule import Program, Rule, arguments_of
from longmesh.rules.window import Slide, window_size
from longmesh.rules.writer import Writer
from longmesh.spec.placement import identity_of


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

    def options(self, borders: Sequence[Border]) -> tuple[list[int], ...]:
        """Kernel, stride and padding of the local call: no padding along a sharded dim, where it was done by hand."""
        sharded = [border.dim for border in borders]
        inner = [0 if dim in sharded else self.padding[i] for i, dim in enumerate(self.slides)]
        return self.kernel, self.stride, inner


def _of_each(value: Any, n: int) -> list[int]:
    values: list[int] = [value] if isinstance(value, int) else list(value)
    return values * n if len(values) == 1 else values


def _is_sharded(tensor: Any, n: int) -> bool:
    return isinstance(tensor, Planned) and any(d >= tensor.ndim - n for d in tensor.global_layout.shard_dims)


def _pool_of(func: OpOverload, given: dict[str, Any], *names: str) -> Pool | None:
    """The call, if one of the tensors `names` is sharded along a spatial dim and padding may be put there by hand;
    None where the lines do it, or torch is to say what is wrong."""
    n, x = 3 if "pool3d" in schema_of(func).name else 2, given["self"]
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


def max_pool(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """max_pool2d_with_indices, max_pool3d_with_indices."""
    given = arguments_of(func, args, kwargs)
    pool = _pool_of(func, given, "self")
    if pool is None:
        return p.by_lines(func, args, kwargs)
    x = p.reduced(given["self"])
    borders = borders_of(pool.slides, x.global_layout, x.global_layout, pool.out_shape, p.coordinate)
    shape = tuple(map(int, x.global_layout.local_shape(pool.out_shape, p.coordinate)))
    options = (*pool.options(borders), pool.dilation, False)
    shifts = tuple((b.dim - x.ndim + pool.n, b.window.rows[0] - b.window.before) for b in borders)
    rows = fetch(p, x, x.local_shape, x.dtype, borders)
    values, places = p.locals(2, _maxima, rows, func, options, pads_of(borders), shape, pool.sizes, shifts)
    return p.wrap(values, x, shape=pool.out_shape), p.wrap(places, x, shape=pool.out_shape, dtype=torch.int64)


def _maxima(
    rows: torch.Tensor,
    func: OpOverload,
    options: tuple[Any, ...],
    pads: Pads,
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    shifts: tuple[tuple[int, int], ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    local = padded(rows, pads, value=identity_of("max", rows.dtype))
    if 0 in shape:
        return local.new_zeros(shape), local.new_zeros(shape, dtype=torch.int64)
    values, places = func(local, *options)
    return values, _renumbered(places, tuple(local.shape[-len(sizes) :]), sizes, dict(shifts))


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


def max_pool_backward(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gradients go to the places that the maxima came from, and then to the ranks that have those."""
    given = arguments_of(func, args, kwargs)
    pool = _pool_of(func, given, "grad_output", "self", "indices")
    if pool is None:
        return p.by_lines(func, args, kwargs)

    def options(borders: Sequence[Border]) -> tuple[Any, ...]:
        ndim = given["self"].ndim
        return pool.sizes, tuple((b.dim - ndim + pool.n, -b.window.rows[0]) for b in borders)

    return _backward(p, pool, given, _to_places, options, "grad_output", "indices")


def _to_places(
    local: torch.Tensor,
    where: torch.Tensor,
    covered: tuple[int, ...],
    sizes: tuple[int, ...],
    shifts: tuple[tuple[int, int], ...],
) -> torch.Tensor:
    rows, n = local.new_zeros(covered), len(sizes)
    if local.numel():
        flat = _renumbered(where, sizes, covered[-n:], dict(shifts))
        rows.flatten(-n).scatter_add_(-1, flat.flatten(-n), local.flatten(-n))
    return rows


def _backward(
    p: Writer,
    pool: Pool,
    given: dict[str, Any],
    run: Callable[..., torch.Tensor],
    options: Callable[[Sequence[Border]], tuple[Any, ...]],
    *names: str,
) -> Any:
    """The gradient of the image. `run(..., shape, *options)` makes that of the rows that the rank's windows cover, of
    its parts of the arguments `names`; then each row's goes to the rank that has it.

    It is laid out as the image if that is sharded along a spatial dim, else as the result's gradient.
    """
    grad, x = given["grad_output"], given["self"]
    layout = without_pending(x.global_layout if _is_sharded(x, pool.n) else grad.global_layout)
    borders = borders_of(pool.slides, layout, layout, pool.out_shape, p.coordinate)
    own = list(map(int, layout.local_shape(x.shape, p.coordinate)))
    parts = [p.redistribute(given[name], layout) for name in names]
    rows = p.local(run, *parts, tuple(fetched_shape(own, borders)), *options(borders))
    return p.wrap(send_home(p, rows, own, grad.dtype, borders), grad, layout=layout, shape=x.shape)


# -- averages --------------------------------------------------------------------------------------


def avg_pool(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """avg_pool2d, avg_pool3d: linear, so a pending sum stays one."""
    given = arguments_of(func, args, kwargs)
    pool = _pool_of(func, given, "self")
    if pool is None:
        return p.by_lines(func, args, kwargs)
    x = p.linear_or_reduced(given["self"])
    borders = borders_of(pool.slides, x.global_layout, x.global_layout, pool.out_shape, p.coordinate)
    shape = tuple(map(int, x.global_layout.local_shape(pool.out_shape, p.coordinate)))
    options = (*pool.options(borders), False, given["count_include_pad"], given["divisor_override"])
    rows = fetch(p, x, x.local_shape, x.dtype, borders)
    return p.wrap(p.local(_means, rows, func, options, pads_of(borders), shape), x, shape=pool.out_shape)


def _means(
    rows: torch.Tensor, func: OpOverload, options: tuple[Any, ...], pads: Pads, shape: tuple[int, ...]
) -> torch.Tensor:
    return rows.new_zeros(shape) if 0 in shape else func(padded(rows, pads), *options)


def avg_pool_backward(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each output's gradient is shared by the rows of its window."""
    given = arguments_of(func, args, kwargs)
    pool = _pool_of(func, given, "grad_output", "self")
    if pool is None:
        return p.by_lines(func, args, kwargs)

    def options(borders: Sequence[Border]) -> tuple[Any, ...]:
        counted = given["count_include_pad"], given["divisor_override"]
        return func, (*pool.options(borders), False, *counted), pads_of(borders)

    return _backward(p, pool, given, _share, options, "grad_output")


def _share(
    local: torch.Tensor, covered: tuple[int, ...], func: OpOverload, options: tuple[Any, ...], pads: Pads
) -> torch.Tensor:
    rows = local.new_zeros(covered)
    return padded(func(local, padded(rows, pads), *options), pads, sign=-1) if local.numel() else rows


def _pool(*cores: int, outputs: int = 1, linear: int | None = None, program: Program | None = None) -> Rule:
    return Rule(batched(cores, cores[:1] * outputs, linear), local_op=op_on_nothing, program=program)


RULES: dict[str, Rule] = {
    **{f"avg_pool{n}d.default": _pool(n, linear=0, program=avg_pool) for n in (2, 3)},
    **{f"avg_pool{n}d_backward.default": _pool(n, n, linear=0, program=avg_pool_backward) for n in (2, 3)},
    **{f"_adaptive_avg_pool{n}d.default": _pool(n, linear=0) for n in (2, 3)},
    **{f"_adaptive_avg_pool{n}d_backward.default": _pool(n, n, linear=0) for n in (2, 3)},
    **{f"adaptive_max_pool{n}d.default": _pool(n, outputs=2) for n in (2, 3)},
    **{f"adaptive_max_pool{n}d_backward.default": _pool(n, n, n, linear=0) for n in (2, 3)},
    **{f"max_pool{n}d_with_indices.default": _pool(n, outputs=2, program=max_pool) for n in (2, 3)},
    **{
        f"max_pool{n}d_with_indices_backward.default": _pool(n, n, n, linear=0, program=max_pool_backward)
        for n in (2, 3)
    },
    **{f"fractional_max_pool{n}d.default": _pool(n, 1, outputs=2) for n in (2, 3)},
    **{f"fractional_max_pool{n}d_backward.default": _pool(n, n, n, linear=0) for n in (2, 3)},
    **{f"max_unpool{n}d.default": _pool(n, n, linear=0) for n in (2, 3)},
}
