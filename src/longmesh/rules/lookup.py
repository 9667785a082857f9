"""Lookups along a sharded dim: each rank answers for the indices it holds.

    table (9 rows over 4 ranks: 3 3 3 0), indices [0, 4, 8] on every rank
    rank 0 reads row 0, rank 1 row 4 - 3, rank 2 row 8 - 6, rank 3 nothing

A rank reads a row of its own for the indices of others; which results those are is the mask of the lookup.
Where the result is a pending lookup (MaskPartial) the local result is `Masked`: the mask comes along, and is applied
when the sum is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from longmesh._torch import OpOverload, assert_later, dispatch_mode_count
from longmesh.rules.rule import (
    AxisRule,
    Fixed,
    LocalOp,
    LocalView,
    OpCall,
    OutMeta,
    R,
    Rule,
    S,
    contiguous,
    line,
    refuse_shapes,
)
from longmesh.rules.view import PENDING
from longmesh.rules.writer import Writer
from longmesh.spec import MaskPartial

LOOKUP = MaskPartial()


def own_part(index: torch.Tensor, offset: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices into this rank's rows (0 where they are another's), and the mask of those that are."""
    mask = (index < offset) | (index >= offset + length)
    return torch.where(mask, 0, index - offset), mask


def check_range(index: torch.Tensor, size: int, dim: int, *, negative: bool = False) -> None:
    """Raise where plain torch would. Called after the op's collectives: only some ranks may see the index."""
    if index.is_meta or index.numel() == 0:
        return
    bad = (index >= size) | (index < (-size if negative else 0))
    if can_read(bad) and bool(bad.any()):
        value = int(index[bad].flatten()[0])
        raise IndexError(f"index {value} is out of bounds for dimension {dim} with size {size}")
    refuse_unread(bad.any(), f"an index is out of bounds for dimension {dim} with size {size}")


def can_read(tensor: torch.Tensor) -> bool:
    """Whether a value may be looked at now: not on an accelerator, which would wait, nor while being traced."""
    return tensor.device.type == "cpu" and not dispatch_mode_count()


def refuse_unread(bad: torch.Tensor, text: str) -> None:
    """Raise `text` when `bad` turns out to be true, if it can't be read now."""
    if not can_read(bad):
        assert_later(~bad, text)


class Masked(NamedTuple):
    """The raw result of a lookup, and the mask of what is another rank's."""

    result: torch.Tensor
    mask: torch.Tensor


def copy_pending(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """detach, alias and clone of a pending lookup are pending, too, and share its mask."""
    if not any(isinstance(q, MaskPartial) for q in args[0].global_layout.placements):
        return p.by_lines(func, args, kwargs)
    return p.pending_like(p.local(func, args[0], **kwargs), args[0])


# -- embedding -----------------------------------------------------------------------------------------


def embedding_lines(call: OpCall) -> list[AxisRule]:
    last = call.tensors[1].ndim
    lines = [line([S(0), R], LOOKUP), line([S(1), R], S(last))]
    lines += [line([R, S(d)], S(d)) for d in range(last)]
    return lines + [line([p, R], p) for p in PENDING]


def embedding_meta(call: OpCall) -> tuple[OutMeta, ...]:
    weight, indices = call.tensors
    return (contiguous((*indices.shape, weight.shape[1])),)


def _embed(rows: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.embedding(index, rows)


# -- index_select, gather, take ------------------------------------------------------------------------


def index_select_lines(call: OpCall) -> list[AxisRule]:
    ndim, dim = call.tensors[0].ndim, call.dim()
    if ndim == 0:
        return []
    lines = [line([S(d), R], S(d)) for d in range(ndim) if d != dim]
    lines.append(line([S(dim), R], LOOKUP))
    if call.tensors[1].ndim:
        lines.append(line([R, S(0)], S(dim)))
    return lines + [line([p, R], p) for p in PENDING]


def index_select_meta(call: OpCall) -> tuple[OutMeta, ...]:
    tensor, index = call.tensors
    shape = list(tensor.shape)
    if shape:
        shape[call.dim()] = index.shape[0] if index.ndim else 1
    return (contiguous(shape),)


def looking_up(
    dim_of: Callable[[OpCall], int], read: Callable[[torch.Tensor, int, torch.Tensor], torch.Tensor]
) -> LocalOp:
    """A lookup along dim `dim_of(call)`: `read(rows, dim, index)` of a rank's own rows."""

    def local_op(call: OpCall, view: LocalView) -> Callable[..., Any] | None:
        dim, meta = dim_of(call), call.tensors[0]
        if meta.ndim == 0 or view.input_shapes[0][dim] == meta.shape[dim]:
            return None
        offset, length = view.input_offsets[0][dim], view.input_shapes[0][dim]
        return Fixed(_look_up, (read, dim, meta.shape[dim], (offset, length), view.output_shapes[0]))

    return local_op


def _look_up(
    read: Callable[[torch.Tensor, int, torch.Tensor], torch.Tensor],
    dim: int,
    size: int,
    own: tuple[int, int],
    shape: tuple[int, ...],
    /,
    local: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Masked:
    index = next(a for a in args if isinstance(a, torch.Tensor))
    check_range(index, size, dim)
    mine, mask = own_part(index, *own)
    return Masked(local.new_zeros(shape) if own[1] == 0 else read(local, dim, mine), mask)


def select_locally(call: OpCall, view: LocalView) -> Callable[..., Any] | None:
    """index_select: its index is one dim of the result, and so is the mask."""
    look_up = _looking_up_rows(call, view)
    if look_up is None:
        return None
    sides = tuple(-1 if d == call.dim() else 1 for d in range(call.tensors[0].ndim))
    return Fixed(_select, (look_up, sides))


def _select(look_up: Callable[..., Masked], sides: tuple[int, ...], /, *args: Any) -> Masked:
    result, mask = look_up(*args)
    return Masked(result, mask.view(sides))


_looking_up_rows = looking_up(OpCall.dim, lambda rows, dim, index: rows.index_select(dim, index.reshape(-1)))


def gather_lines(call: OpCall) -> list[AxisRule]:
    """Along another dim than the gathered one, position i of the index reads position i of the tensor."""
    tensor, index = call.tensors
    dim = call.dim()
    if tensor.ndim == 0 or index.ndim == 0:
        return []
    lines = [
        line([S(d), S(d)], S(d)) for d in range(tensor.ndim) if d != dim and tensor.shape[d] == index.shape[d]
    ]
    lines += [line([S(dim), R], LOOKUP), line([R, S(dim)], S(dim))]
    return lines + [line([p, R], p) for p in PENDING]


def gather_meta(call: OpCall) -> tuple[OutMeta, ...]:
    tensor, index = call.tensors
    if tensor.ndim and index.ndim == tensor.ndim:
        dim = call.dim()
        if any(n > tensor.shape[d] for d, n in enumerate(index.shape) if d != dim):
            refuse_shapes(call, f"but for dim {dim}, the index may be no larger than the tensor")
    return (contiguous(index.shape),)


def take_meta(call: OpCall) -> tuple[OutMeta, ...]:
    return (contiguous(call.tensors[1].shape),)


def take_lines(call: OpCall) -> list[AxisRule]:
    """The tensor is read as if it were flat, so it is whole; the index may be sharded."""
    lines = [line([R, S(d)], S(d)) for d in range(call.tensors[1].ndim)]
    return lines + [line([p, R], p) for p in PENDING]


RULES: dict[str, Rule] = {
    "embedding.default": Rule(embedding_lines, embedding_meta, local_op=looking_up(lambda call: 0, _embed)),
    "index_select.default": Rule(index_select_lines, index_select_meta, local_op=select_locally),
    "gather.default": Rule(gather_lines, gather_meta, local_op=looking_up(OpCall.dim, torch.gather)),
    "take.default": Rule(take_lines, take_meta),
}
