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

from longmesh._torch import assert_later, dispatch_mode_count
from longmesh.rules.rule import (
    AxisRule,
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


# -- embedding -----------------------------------------------------------------------------------------


def embedding_lines(call: OpCall) -> list[AxisRule]:
    last = call.tensors[1].ndim
    lines = [line([S(0), R], LOOKUP), line([S(1), R], S(last))]
    lines += [line([R, S(d)], S(d)) for d in range(last)]
    return lines + [line([p, R], p) for p in PENDING]


def embedding_meta(call: OpCall) -> tuple[OutMeta, ...]:
    weight, indices = call.tensors
    return (contiguous((*indices.shape, weight.shape[1])),)


def _embed_locally(call: OpCall, view: LocalView) -> Callable[..., Any] | None:
    own = _own_rows(call, view, 0)
    if own is None:
        return None
    size, offset, length = own

    def embed(weight: torch.Tensor, indices: torch.Tensor, *args: Any, **kwargs: Any) -> Masked:
        check_range(indices, size, 0)
        mine, mask = own_part(indices, offset, length)
        if length == 0:
            return Masked(weight.new_zeros((*indices.shape, weight.shape[1])), mask)
        return Masked(torch.nn.functional.embedding(mine, weight), mask)

    return embed


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


def _own_rows(call: OpCall, view: LocalView, dim: int) -> tuple[int, int, int] | None:
    """Size of a dim, and where this rank's rows of it begin and how many they are; None if it has all of them."""
    if call.tensors[0].ndim == 0 or view.input_shapes[0][dim] == call.tensors[0].shape[dim]:
        return None
    return call.tensors[0].shape[dim], view.input_offsets[0][dim], view.input_shapes[0][dim]


def _select_locally(call: OpCall, view: LocalView) -> Callable[..., Any] | None:
    ndim, dim = call.tensors[0].ndim, call.dim()
    own = _own_rows(call, view, dim)
    if own is None:
        return None
    size, offset, length = own

    def select(local: torch.Tensor, _: int, index: torch.Tensor) -> Masked:
        check_range(index, size, dim)
        mine, mask = own_part(index.reshape(-1), offset, length)
        wide = mask.view(*(-1 if d == dim else 1 for d in range(ndim)))
        if length == 0:
            return Masked(local.new_zeros(view.output_shapes[0]), wide)
        return Masked(local.index_select(dim, mine), wide)

    return select


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


def _gather_locally(call: OpCall, view: LocalView) -> Callable[..., Any] | None:
    dim = call.dim()
    own = _own_rows(call, view, dim)
    if own is None:
        return None
    size, offset, length = own

    def gather(local: torch.Tensor, _: int, index: torch.Tensor, **kwargs: Any) -> Masked:
        check_range(index, size, dim)
        mine, mask = own_part(index, offset, length)
        if length == 0:
            return Masked(local.new_zeros(index.shape), mask)
        return Masked(local.gather(dim, mine), mask)

    return gather


def take_lines(call: OpCall) -> list[AxisRule]:
    """The tensor is read as if it were flat, so it is whole; the index may be sharded."""
    lines = [line([R, S(d)], S(d)) for d in range(call.tensors[1].ndim)]
    return lines + [line([p, R], p) for p in PENDING]


RULES: dict[str, Rule] = {
    "embedding.default": Rule(embedding_lines, embedding_meta, local_op=_embed_locally),
    "index_select.default": Rule(index_select_lines, index_select_meta, local_op=_select_locally),
    "gather.default": Rule(gather_lines, gather_meta, local_op=_gather_locally),
    "take.default": Rule(take_lines, take_meta),
}
