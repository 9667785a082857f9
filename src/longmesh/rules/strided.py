"""Views that pick elements at steps or in an order: windows, diagonals, complex pairs.

A dim they don't touch stays sharded. A view moves elements and computes nothing, so every kind of pending reduction
goes through; its backward puts zeros around them, so there only sums do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from longmesh._torch import OpOverload
from longmesh.errors import LongmeshError
from longmesh.rules.halo import borders_of, fetch
from longmesh.rules.planned import Planned
from longmesh.rules.rule import AxisRule, Fixed, LocalView, OpCall, Rule, arguments_of, contiguous, no_lines
from longmesh.rules.view import LINEAR, along_others, kept, local_sizes, other_dims
from longmesh.rules.window import Slide
from longmesh.rules.writer import Writer


def diagonal_lines(call: OpCall) -> list[AxisRule]:
    return kept(call, diagonal_pairs(call, call.tensors[0].ndim))


def inverse_lines(
    forward: Callable[[OpCall, int], list[tuple[int, int]]],
) -> Callable[[OpCall], list[AxisRule]]:
    """The backward of a view: dim `o` of the gradient becomes dim `i`. Zeros around it, so only sums stay pending."""
    return lambda call: kept(call, [(o, i) for i, o in forward(call, len(call.outputs[0].shape))], LINEAR)


def diagonal_pairs(call: OpCall, ndim: int) -> list[tuple[int, int]]:
    """The dims that diagonal() keeps, and where they go: two dims go, the diagonal comes last."""
    taken = (call["dim1"] % ndim, call["dim2"] % ndim)
    return [(d, o) for o, d in enumerate(d for d in range(ndim) if d not in taken)]


def _unfold_pairs(call: OpCall, ndim: int) -> list[tuple[int, int]]:
    return [(d, d) for d in range(ndim) if d != call["dim"] % max(ndim, 1)]


def from_pairs(call: OpCall) -> list[AxisRule]:
    return kept(call, other_dims(call, [call.tensors[0].ndim - 1]), LINEAR)


def same_dims(call: OpCall) -> list[AxisRule]:
    return kept(call, other_dims(call, ()), LINEAR)


def bits_lines(call: OpCall) -> list[AxisRule]:
    """view(dtype): only the last dim may change its size; nothing pending goes through other bits."""
    tensor, out = call.tensors[0], call.outputs[0].shape
    return kept(call, [(d, d) for d in range(tensor.ndim) if tensor.shape[d] == out[d]], ())


def _as_strided_locally(call: OpCall, view: LocalView) -> Callable[..., Any]:
    meta = call.tensors[0]
    lengths = [(n, step) for n, step in zip(meta.shape, meta.stride, strict=True) if step]
    if math.prod(n for n, _ in lengths) < 1 + sum((n - 1) * step for n, step in lengths):
        raise LongmeshError(
            f"as_strided of a view with gaps, of shape {tuple(meta.shape)} and stride {tuple(meta.stride)}: the values "
            "in the gaps are not known here; call it on the base of the view, or on contiguous()"
        )
    return Fixed(_strided, (meta.shape, meta.stride))


def _strided(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    /,
    local: torch.Tensor,
    size: Any,
    stride: Any,
    storage_offset: Any = None,
) -> torch.Tensor:
    """As of the whole in memory, of that shape and those strides."""
    if local.stride() != strides:
        whole = torch.empty_strided(shape, strides, dtype=local.dtype, device=local.device)
        # A dim of stride 0 is one row in memory, and may be written as one only.
        once = [min(n, 1) if step == 0 else n for n, step in zip(shape, strides, strict=True)]
        whole.as_strided(once, strides).copy_(local.as_strided(once, local.stride()))
        local = whole
    return local.as_strided(size, stride, storage_offset)


def frames(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """as_strided as stft calls it, frames of a signal whose samples are sharded: the rows of a frame beyond the border
    are fetched, and the frames are sharded."""
    given = arguments_of(func, args, kwargs)
    x: Planned = given["self"]
    size, stride, dim = tuple(given["size"]), tuple(given["stride"]), x.ndim - 1
    shape, before = tuple(x.shape), contiguous(x.shape).stride
    is_framed = (
        len(size) == x.ndim + 1
        and x.ndim > 0
        and (size[:dim], stride[:dim], stride[-1]) == (shape[:dim], before[:dim], 1)
        and tuple(x.stride()) == before
        and not given["storage_offset"]
    )
    if not is_framed or not x.global_layout.shard_axes(dim) or not (x.numel() and math.prod(size)):
        return p.by_lines(func, args, kwargs)
    count, length = size[dim:]
    hop = stride[dim]
    if hop < 1 or (count - 1) * hop + length > shape[dim]:
        return p.by_lines(func, args, kwargs)
    x = p.linear_or_reduced(x)
    layout, slide = x.global_layout, Slide(shape[dim], length, hop, 0, 1)
    borders = borders_of({dim: slide}, layout, layout, size[:-1], p.coordinate)
    rows = fetch(p, x, x.local_shape, x.dtype, borders)
    own = tuple(map(int, layout.local_shape(size, p.coordinate)))
    return p.wrap(p.local(_framed, rows, length, hop, own), x, shape=size)


def _framed(rows: torch.Tensor, length: int, hop: int, shape: tuple[int, ...]) -> torch.Tensor:
    return rows.unfold(-1, length, hop).contiguous() if math.prod(shape) else rows.new_zeros(shape)


def _conj_locally(call: OpCall, view: LocalView) -> Callable[..., Any]:
    """Conjugated in memory: a lazy conjugate bit would be lost on the wire."""
    return torch.conj_physical


def unbind_lines(call: OpCall) -> list[AxisRule]:
    dim = call.dim()
    return kept(call, [(d, d - (d > dim)) for d, _ in other_dims(call, [dim])])


RULES: dict[str, Rule] = {
    "unfold.default": Rule(along_others("dimension")),
    "unfold_backward.default": Rule(inverse_lines(_unfold_pairs), local_args=local_sizes),
    "diagonal.default": Rule(diagonal_lines),
    "diagonal_copy.default": Rule(diagonal_lines),
    "diagonal_backward.default": Rule(inverse_lines(diagonal_pairs), local_args=local_sizes),
    "diag_embed.default": Rule(inverse_lines(diagonal_pairs)),
    "as_strided.default": Rule(no_lines, local_op=_as_strided_locally, program=frames),
    "as_strided_scatter.default": Rule(no_lines),
    "view_as_real.default": Rule(same_dims),
    "view_as_complex.default": Rule(from_pairs),
    **dict.fromkeys(("_conj.default", "_conj_physical.default"), Rule(same_dims, local_op=_conj_locally)),
    **dict.fromkeys(("resolve_conj.default", "resolve_neg.default"), Rule(same_dims)),
    "view.dtype": Rule(bits_lines),
    "unbind.int": Rule(unbind_lines),
}
