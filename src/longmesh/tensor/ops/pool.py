"""Pooling over a cut spatial dim: fetch the rows around the cut, then pool locally.

Padding of a cut dim is put there by hand: the smallest number for a maximum, zeros for an average that counts them.
The places that a maximum comes from are numbered in the whole image. Where the last window may hang over the
edge (`ceil_mode`), or an average does not count its padding, spatial dims are gathered by the op's rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from longmesh.comm import comm_of
from longmesh.rules.window import Slide, window_size
from longmesh.spec import Layout
from longmesh.spec.identity import identity_of
from longmesh.tensor.autograd import gradient_layout, move
from longmesh.tensor.dispatch import Handler, dispatch
from longmesh.tensor.dtensor import DTensor
from longmesh.tensor.meta import global_stride
from longmesh.tensor.ops.halo import Halo, fetch, halos_of, padded, send_home
from longmesh.tensor.ops.pieces import bind, linear_or_reduced, reduced

aten = torch.ops.aten


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

    def inner_padding(self, halos: Sequence[Halo]) -> list[int]:
        """What the local call pads: nothing along a cut dim, where it was done by hand."""
        cut = [halo.dim for halo in halos]
        return [0 if dim in cut else self.padding[i] for i, dim in enumerate(self.slides)]


def _of_each(value: Any, n: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * n if len(values) == 1 else values


def _num_dims(func: OpOverload) -> int:
    return 3 if "pool3d" in func._schema.name else 2


def _is_cut(tensor: Any, n: int) -> bool:
    return isinstance(tensor, DTensor) and any(d >= tensor.ndim - n for d in tensor._layout.shard_dims)


def _planned(func: OpOverload, given: dict[str, Any], *names: str) -> Pool | None:
    """The call, if one of the tensors called `names` is cut along a spatial dim and padding may be put there by hand;
    None where the op's rule does it, or torch is to say what is wrong."""
    n, x = _num_dims(func), given["self"]
    counted = given.get("count_include_pad", True) or given.get("divisor_override") is not None
    if given["ceil_mode"] or not (counted or not any(_of_each(given["padding"], n))):
        return None
    if not all(isinstance(given[name], DTensor) for name in names) or not x.numel():
        return None
    if not any(_is_cut(given[name], n) for name in names):
        return None
    pool = Pool(given, x.shape, n)
    reach = [d * (k - 1) + 1 for k, d in zip(pool.kernel, pool.dilation, strict=True)]
    is_valid = all(p <= r // 2 for p, r in zip(pool.padding, reach, strict=True))
    return pool if is_valid and min(pool.out_shape) > 0 else None


# -- maxima ----------------------------------------------------------------------------------------


def max_pool(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """max_pool2d_with_indices, max_pool3d_with_indices."""
    given, n = bind(func, args, kwargs), _num_dims(func)
    pool = _planned(func, given, "self")
    if pool is None:
        return dispatch.run(func, args, kwargs)
    x = reduced(given["self"])
    layout, comm = x._layout, comm_of(x._mesh)
    halos = halos_of(pool.slides, layout, layout, pool.out_shape, comm)
    local = padded(fetch(x._local_tensor, halos), halos, value=identity_of("max", x.dtype))
    shape = layout.local_shape(pool.out_shape, comm.coordinate)
    if 0 in shape:
        values, places = local.new_zeros(shape), local.new_zeros(shape, dtype=torch.int64)
    else:
        values, places = func(
            local, pool.kernel, pool.stride, pool.inner_padding(halos), pool.dilation, False
        )
        shifts = {halo.dim - x.ndim + n: halo.window.rows[0] - halo.window.before for halo in halos}
        places = _renumbered(places, tuple(local.shape[-n:]), pool.sizes, shifts)
    return _wrapped(values, x, layout, pool.out_shape), _wrapped(places, x, layout, pool.out_shape)


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


def max_pool_backward(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gradients go to the places that the maxima came from, and then to the ranks that hold those."""
    given, n = bind(func, args, kwargs), _num_dims(func)
    pool = _planned(func, given, "grad_output", "self", "indices")
    if pool is None:
        return dispatch.run(func, args, kwargs)
    grad, x = given["grad_output"], given["self"]
    layout = _common_layout(grad, x, n)
    local, where = move(grad, layout)._local_tensor, move(given["indices"], layout)._local_tensor
    halos = halos_of(pool.slides, layout, layout, pool.out_shape, comm_of(x._mesh))
    rows = _empty_rows(local, x, layout, halos)
    if local.numel():
        shifts = {halo.dim - x.ndim + n: -halo.window.rows[0] for halo in halos}
        flat = _renumbered(where, pool.sizes, tuple(rows.shape[-n:]), shifts)
        rows.flatten(-n).scatter_add_(-1, flat.flatten(-n), local.flatten(-n))
    return _wrapped(send_home(rows, halos), x, layout, x.shape)


def _common_layout(grad: DTensor, x: DTensor, n: int) -> Layout:
    """Where a gradient is made: as the image lies if that is cut along a spatial dim, else as its gradient."""
    return gradient_layout(x._layout if _is_cut(x, n) else grad._layout)


def _empty_rows(grad: torch.Tensor, x: DTensor, layout: Layout, halos: Sequence[Halo]) -> torch.Tensor:
    """Zeros for the rows of the image that this rank's windows cover."""
    shape = list(layout.local_shape(x.shape, comm_of(x._mesh).coordinate))
    for halo in halos:
        low, high = halo.window.rows
        shape[halo.dim] = high - low
    return grad.new_zeros(shape)


# -- averages --------------------------------------------------------------------------------------


def avg_pool(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """avg_pool2d, avg_pool3d: linear, so a pending sum stays one."""
    given = bind(func, args, kwargs)
    pool = _planned(func, given, "self")
    if pool is None:
        return dispatch.run(func, args, kwargs)
    x = linear_or_reduced(given["self"])
    layout, comm = x._layout, comm_of(x._mesh)
    halos = halos_of(pool.slides, layout, layout, pool.out_shape, comm)
    local = padded(fetch(x._local_tensor, halos), halos)
    shape = layout.local_shape(pool.out_shape, comm.coordinate)
    result = local.new_zeros(shape) if 0 in shape else func(local, *_averaging(given, pool, halos))
    return _wrapped(result, x, layout, pool.out_shape)


def avg_pool_backward(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given, n = bind(func, args, kwargs), _num_dims(func)
    pool = _planned(func, given, "grad_output", "self")
    if pool is None:
        return dispatch.run(func, args, kwargs)
    grad, x = given["grad_output"], given["self"]
    layout = _common_layout(grad, x, n)
    local = move(grad, layout)._local_tensor
    halos = halos_of(pool.slides, layout, layout, pool.out_shape, comm_of(x._mesh))
    rows = _empty_rows(local, x, layout, halos)
    if local.numel():
        around = func(local, padded(rows, halos), *_averaging(given, pool, halos))
        rows = padded(around, halos, sign=-1)
    return _wrapped(send_home(rows, halos), x, layout, x.shape)


def _averaging(given: dict[str, Any], pool: Pool, halos: Sequence[Halo]) -> tuple[Any, ...]:
    padding = pool.inner_padding(halos)
    return pool.kernel, pool.stride, padding, False, given["count_include_pad"], given["divisor_override"]


def _wrapped(local: torch.Tensor, x: DTensor, layout: Layout, shape: Sequence[int]) -> DTensor:
    return DTensor(local, x._mesh, layout, tuple(shape), global_stride(shape, local))


HANDLERS: dict[OpOverload, Handler] = {
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
