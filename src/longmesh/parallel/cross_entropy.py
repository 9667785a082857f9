"""Cross entropy of logits sharded by classes, as one step of autograd on local tensors.

Per row of logits x with target y, class weights w and label smoothing e over C classes:

    loss = (1 - e) w[y] (lse - x[y])  +  e/C (sum(w) lse - sum(w x))           lse = log(sum(exp(x)))

The ranks add up exp(x), x[y] and sum(w x), all relative to the row's largest logit. A mean divides by the sum of
w[y] over all rows that are not ignored, of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from longmesh._torch import no_torch_functions
from longmesh.comm import comm_of
from longmesh.comm.collectives import all_reduce
from longmesh.errors import LongmeshError
from longmesh.parallel.layer import gradients_by_ops
from longmesh.rules.lookup import can_read, refuse_unread
from longmesh.spec import Layout, Partial, Placement, Replicate, Shard
from longmesh.spec.strides import contiguous_stride
from longmesh.tensor import DTensor
from longmesh.tensor.autograd import current_part, move
from longmesh.tensor.outside import results_outside
from longmesh.tensor.tensor_layout import tensor_layout

_HALVES = (torch.float16, torch.bfloat16)


def is_sharded_by_classes(logits: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether logits are sharded by classes, with nothing pending, and targets are indices."""
    return (
        isinstance(logits, DTensor)
        and logits.ndim > 0
        and logits.is_floating_point()
        and not target.is_floating_point()
        and bool(logits._layout.shard_axes(_class_dim(logits.ndim)))
        and not logits._layout.partial_axes
        and not torch.compiler.is_compiling()
    )


def sharded_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> torch.Tensor:
    """F.cross_entropy of such logits. Collective: every rank of the mesh."""
    assert isinstance(logits, DTensor)
    _check(logits, target, weight, reduction, label_smoothing)
    rows = _row_layout(logits._layout, _class_dim(logits.ndim))
    terms = _Terms(
        rows=rows,
        classes=logits.shape[_class_dim(logits.ndim)],
        ignore_index=ignore_index,
        reduction=reduction,
        smoothing=label_smoothing,
    )
    if not logits._tensor_layout.comm.is_member:
        own, layout = logits._tensor_layout, _result_layout(terms)
        shape = _result_shape(terms, logits.shape)
        made = tensor_layout(own.mesh, layout, shape, contiguous_stride(shape), own.dtype)
        return results_outside([logits], [made])[0]

    def by_ops(logits: torch.Tensor) -> torch.Tensor:
        options = {"reduction": reduction, "label_smoothing": label_smoothing, "ignore_index": ignore_index}
        with no_torch_functions():  # a loss_parallel() that is still open would come back here
            return F.cross_entropy(logits, target, weight, **options)

    mine = _part_of(target, rows, logits)
    weights = None if weight is None else _part_of(weight, Layout.replicated(logits.device_mesh), logits)
    return _CrossEntropy.apply(logits, mine, weights, terms, by_ops)


@dataclass(frozen=True, eq=False, slots=True)
class _Terms:
    """What is the same for all rows: their layout, and the options of the loss."""

    rows: Layout
    classes: int
    ignore_index: int
    reduction: str
    smoothing: float


def _class_dim(ndim: int) -> int:
    return 0 if ndim == 1 else 1


def _check(
    logits: DTensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: str, smoothing: float
) -> None:
    dim = _class_dim(logits.ndim)
    rows = (*logits.shape[:dim], *logits.shape[dim + 1 :])
    if tuple(target.shape) != rows:
        raise LongmeshError(
            f"cross_entropy: logits {tuple(logits.shape)} need targets of shape {rows}, got {tuple(target.shape)}; a "
            "plain target is that of all ranks together, a part of it goes through DTensor.from_local"
        )
    if weight is not None and tuple(weight.shape) != (logits.shape[dim],):
        raise LongmeshError(
            f"cross_entropy: weight has shape {tuple(weight.shape)} and there are {logits.shape[dim]} classes; "
            "give one weight per class, of all classes"
        )
    if reduction not in ("none", "mean", "sum"):
        raise LongmeshError(f"{reduction!r} is not a reduction of cross_entropy; allowed: none, mean, sum")
    if not 0.0 <= smoothing <= 1.0:
        raise LongmeshError(f"label_smoothing must be between 0.0 and 1.0. Got: {smoothing}")


def _row_layout(layout: Layout, dim: int) -> Layout:
    """The layout of one number per row: that of the logits, without their class dim."""

    def shift(d: int) -> int:
        return d if d < dim else d - 1

    placements: list[Placement] = [
        Shard(shift(p.dim)) if isinstance(p, Shard) and p.dim != dim else Replicate()
        for p in layout.placements
    ]
    order = [(shift(d), axes) for d, axes in layout.shard_order if d != dim]
    return Layout(layout.mesh, placements, order)


def _part_of(tensor: torch.Tensor, layout: Layout, like: DTensor) -> torch.Tensor:
    """This rank's part of a target or weight; a plain one is whole."""
    if isinstance(tensor, DTensor):
        return move(tensor, layout)._local_tensor
    for dim in layout.shard_dims:
        start, length = layout.interval(dim, tensor.shape[dim], comm_of(like.device_mesh).coordinate)
        tensor = tensor.narrow(dim, int(start), int(length))
    return tensor


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: DTensor,
        target: torch.Tensor,
        weight: torch.Tensor | None,
        terms: _Terms,
        by_ops: Callable[[torch.Tensor], torch.Tensor],
    ) -> DTensor:
        mesh, layout, comm = logits.device_mesh, logits._layout, comm_of(logits.device_mesh)
        dim = _class_dim(logits.ndim)
        x = current_part(logits)
        start = int(layout.interval(dim, terms.classes, comm.coordinate)[0])
        is_own = (target >= start) & (target < start + x.shape[dim]) & (target != terms.ignore_index)
        place = torch.where(is_own, target - start, 0).unsqueeze(dim)
        group = comm.group(tuple(sorted(layout.shard_axes(dim))))

        wide = x.float() if x.dtype in _HALVES else x
        highest = _highest(wide, dim)
        shifted = wide - all_reduce(highest, reduce_op="max", group=group)
        own_weight = None if weight is None else weight.to(wide.dtype)
        sums = [shifted.exp().sum(dim), _pick(shifted, place, is_own, dim)]
        if terms.smoothing:
            sums.append(_weighted_sum(shifted, own_weight, start, dim))
        added = all_reduce(torch.stack(sums), reduce_op="sum", group=group)

        lse = added[0].log()
        ignored = target == terms.ignore_index
        share = _row_weights(own_weight, target, ignored, lse)
        loss = (lse - added[1]) * share
        if terms.smoothing:
            total = float(terms.classes) if own_weight is None else own_weight.sum()
            spread = (total * lse - added[2]) * (terms.smoothing / terms.classes)
            loss = loss * (1 - terms.smoothing) + spread
        loss = loss.masked_fill(ignored, 0)
        result, divisor = _reduce(loss, share, terms, comm)
        _check_targets(target, terms)

        odds = shifted.sub_(lse.unsqueeze(dim)).exp_()
        ctx.save_for_backward(logits, odds, place, is_own, share, ignored, divisor, own_weight)
        ctx.by_ops = by_ops
        ctx.set_materialize_grads(False)
        ctx.terms, ctx.own, ctx.start = terms, logits._tensor_layout, start
        shape = _result_shape(terms, logits.shape)
        return DTensor(result.to(x.dtype), mesh, _result_layout(terms), shape, contiguous_stride(shape))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        (grad,) = grads
        if grad is None:
            return None, None, None, None, None
        terms: _Terms = ctx.terms
        own = ctx.own
        logits, odds, place, is_own, share, ignored, divisor, weight = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is asked for
            return *gradients_by_ops(ctx.by_ops, (logits,), (True,), grad), None, None, None, None
        dim = _class_dim(len(own.shape))
        wanted = terms.rows if terms.reduction == "none" else Layout.replicated(own.layout.mesh)
        factor = move(grad, wanted)._local_tensor.to(odds.dtype)
        if divisor is not None:
            factor = factor / divisor
        rows = (factor * share * (1 - terms.smoothing)).masked_fill(ignored, 0)
        even = (factor * (terms.smoothing / terms.classes)).expand(share.shape).masked_fill(ignored, 0)
        total = float(terms.classes) if weight is None else weight.sum()
        made = odds * (rows + even * total).unsqueeze(dim)
        if terms.smoothing:
            made = made - even.unsqueeze(dim) * _own_weights(weight, odds, ctx.start, dim)
        if odds.shape[dim]:
            made.scatter_add_(dim, place, -(rows * is_own).unsqueeze(dim))
        local = made.to(own.dtype)
        shape = tuple(own.shape)
        return DTensor(local, own.mesh, own.layout, shape, contiguous_stride(shape)), None, None, None, None


def _highest(x: torch.Tensor, dim: int) -> torch.Tensor:
    if x.shape[dim]:
        return x.amax(dim, keepdim=True)
    return x.new_full((*x.shape[:dim], 1, *x.shape[dim + 1 :]), -math.inf)


def _pick(x: torch.Tensor, place: torch.Tensor, is_own: torch.Tensor, dim: int) -> torch.Tensor:
    """Each row's value at its target, where that is among this rank's classes; else 0."""
    if not x.shape[dim]:
        return x.new_zeros(is_own.shape)
    return x.gather(dim, place).squeeze(dim).masked_fill_(~is_own, 0)


def _own_weights(weight: torch.Tensor | None, x: torch.Tensor, start: int, dim: int) -> torch.Tensor:
    """The weights of this rank's classes, to be multiplied with a tensor shaped as `x`."""
    if weight is None:
        return x.new_ones(())
    return weight[start : start + x.shape[dim]].view(-1, *(1,) * (x.ndim - dim - 1))


def _weighted_sum(x: torch.Tensor, weight: torch.Tensor | None, start: int, dim: int) -> torch.Tensor:
    return (x if weight is None else x * _own_weights(weight, x, start, dim)).sum(dim)


def _row_weights(
    weight: torch.Tensor | None, target: torch.Tensor, ignored: torch.Tensor, like: torch.Tensor
) -> torch.Tensor:
    """What each row counts in a mean: its target's weight, nothing if it is ignored."""
    if weight is None:
        return (~ignored).to(like.dtype)
    known = target.clamp(0, weight.shape[0] - 1)  # what is not a class is refused after the collectives
    return weight[known].masked_fill_(ignored, 0)


def _reduce(
    loss: torch.Tensor, share: torch.Tensor, terms: _Terms, comm: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The result, and what a mean was divided by."""
    if terms.reduction == "none":
        return loss, None
    if terms.reduction == "sum":
        return loss.sum(), None
    both = torch.stack([loss.sum(), share.sum()])
    if axes := _row_axes(terms):
        both = all_reduce(both, reduce_op="sum", group=comm.group(axes))
    total, divisor = both.unbind()
    return total / divisor, divisor


def _row_axes(terms: _Terms) -> tuple[int, ...]:
    """The mesh axes that rows are sharded over."""
    return tuple(sorted(axis for _, axes in terms.rows.shard_order for axis in axes))


def _result_layout(terms: _Terms) -> Layout:
    mesh, axes = terms.rows.mesh, _row_axes(terms)
    if terms.reduction == "none":
        return terms.rows
    if terms.reduction == "sum":
        return Layout(mesh, [Partial() if axis in axes else Replicate() for axis in range(mesh.ndim)])
    return Layout.replicated(mesh)


def _result_shape(terms: _Terms, logits: torch.Size) -> tuple[int, ...]:
    dim = _class_dim(len(logits))
    return (*logits[:dim], *logits[dim + 1 :]) if terms.reduction == "none" else ()


def _check_targets(target: torch.Tensor, terms: _Terms) -> None:
    bad = ((target < 0) | (target >= terms.classes)) & (target != terms.ignore_index)
    if not can_read(bad):
        refuse_unread(bad.any(), f"a target is out of bounds for {terms.classes} classes")
    elif bool(bad.any()):
        raise IndexError(f"Target {int(target[bad].flatten()[0])} is out of bounds.")
