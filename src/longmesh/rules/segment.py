"""segment_reduce: any dim but the one of the segments may be sharded, and that one by a program.

    data (*batch, rows, *rest), lengths (*batch, segments)  ->  (*batch, segments, *rest)

Rows that are sharded: each rank reduces the parts of segments that it has, a pending sum, product or extremum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from longmesh._torch import OpOverload
from longmesh.rules.lookup import can_read
from longmesh.rules.pieces import sharding_axes
from longmesh.rules.planned import Planned
from longmesh.rules.rule import (
    AxisRule,
    Fixed,
    LocalView,
    Meta,
    OpCall,
    OutMeta,
    R,
    Rule,
    S,
    arguments_of,
    contiguous,
    line,
)
from longmesh.rules.writer import Writer
from longmesh.spec import Layout, Partial, Placement

PENDING = {"sum": Partial(), "prod": Partial("product"), "max": Partial("max"), "min": Partial("min")}


def lines(call: OpCall) -> list[AxisRule]:
    """Of the forward (data, lengths) and the backward (grad, output, data, lengths): what is in front of the segments
    is sharded in all of them, what is behind in all but the lengths."""
    axis, limits = _axis(call), call.tensors[-1].index
    found: list[AxisRule] = []
    for dim in range(call["data"].ndim):
        if dim != axis:
            inputs: list[Placement] = [S(dim) if m.index != limits or dim < axis else R for m in call.tensors]
            found.append(line(inputs, S(dim)))
    return found


def _axis(call: OpCall) -> int:
    return call["axis"] % max(call["data"].ndim, 1)


def forward_meta(call: OpCall) -> tuple[OutMeta, ...]:
    data: Meta = call["data"]
    limits: Meta = call.tensors[-1]
    axis = _axis(call)
    count = limits.shape[axis] - (call["lengths"] is None)  # offsets have one more
    return (contiguous((*data.shape[:axis], count, *data.shape[axis + 1 :])),)


def backward_meta(call: OpCall) -> tuple[OutMeta, ...]:
    return (contiguous(call["data"].shape),)


def nothing(call: OpCall, view: LocalView) -> Callable[..., Any] | None:
    """torch refuses parts without elements."""
    shape = view.output_shapes[0]
    return Fixed(_zeros, (shape,)) if 0 in shape and 0 not in call.outputs[0].shape else None


def _zeros(shape: tuple[int, ...], /, first: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return first.new_zeros(shape)


def segment_reduce(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows sharded: the lengths are whole on every rank, which takes of each segment what it has."""
    given = arguments_of(func, args, kwargs)
    data, kind, limits = given["data"], given["reduce"], given["lengths"]
    limits = given["offsets"] if limits is None else limits
    if limits is None:
        return p.on_whole_tensors(func, args, kwargs)
    axis: int = given["axis"] % max(data.ndim, 1)
    axes = sharding_axes(data.global_layout, (axis,))
    if (
        not axes
        or kind not in PENDING
        or given["initial"] is not None
        or limits.ndim != 1
        or not data.numel()
    ):
        return p.by_lines(func, args, kwargs)
    x: Planned = p.reduced(data)
    limits, is_offsets = p.replicated(limits), given["lengths"] is None
    size = None if given["unsafe"] or is_offsets else x.shape[axis]
    part = p.local(_reduce, x, limits, is_offsets, kind, axis, x.interval(axis), size)
    shape = (*x.shape[:axis], limits.shape[0] - is_offsets, *x.shape[axis + 1 :])
    return p.wrap(part, x, layout=_pending(x, axes, PENDING[kind]), shape=shape)


def _pending(data: Planned, axes: tuple[int, ...], pending: Partial) -> Layout:
    before = data.global_layout
    placements = [pending if a in axes else q for a, q in enumerate(before.placements)]
    return Layout(before.mesh, placements, [e for e in before.shard_order if e.mesh_dims[0] not in axes])


def _reduce(
    local: torch.Tensor,
    limits: torch.Tensor,
    is_offsets: bool,
    kind: str,
    axis: int,
    own: tuple[int, int],
    size: int | None,
) -> torch.Tensor:
    """The parts of segments that are among this rank's rows. `size`: what the lengths must add up to, as torch asks."""
    ends = limits[1:] if is_offsets else limits.cumsum(0)
    starts = limits[:-1] if is_offsets else ends - limits
    if size is not None and can_read(limits) and (int(limits.sum()) != size or bool((limits < 0).any())):
        raise RuntimeError(
            f"segment_reduce(): lengths {[int(n) for n in limits]} must not be negative and add up to {size}"
        )
    first, last = own[0], own[0] + own[1]
    mine = ends.clamp(first, last) - starts.clamp(first, last)
    return torch.segment_reduce(local.contiguous(), kind, lengths=mine, axis=axis, unsafe=True)


RULES: dict[str, Rule] = {
    "segment_reduce.default": Rule(lines, forward_meta, local_op=nothing, program=segment_reduce),
    "_segment_reduce_backward.default": Rule(lines, backward_meta, local_op=nothing),
}
