"""loss_parallel: cross entropy of logits that are sharded by classes, which are not gathered.

Per row of logits x with target y, class weights w and label smoothing e over C classes:

    loss = (1 - e) w[y] (lse - x[y])  +  e/C (sum(w) lse - sum(w x))           lse = log(sum(exp(x)))

The ranks need the row's largest logit, and then one sum of a few numbers, all relative to it: of exp(x), of the
target's logit, and for label smoothing of w x. Two small all-reduces; the gradient needs none. A mean divides by the
sum of w[y] over all rows that are not ignored, of the whole.

Scoped: inside the `with`, F.cross_entropy (so nn.CrossEntropyLoss) of such logits runs as one step (layer.py); every
other function is what it was, and gradients belong to the loss, wherever backward() is called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from longmesh._torch import no_torch_functions
from longmesh.attention.scope.open_scopes import current_weigher
from longmesh.errors import LongmeshError
from longmesh.parallel.layer import FusedStep, can_fuse, run_fused
from longmesh.rules.lookup import can_read, refuse_unread
from longmesh.rules.pieces import reduced_layout, reduced_shape, wide_dtype
from longmesh.rules.planned import Planned
from longmesh.spec import Layout, Partial, Replicate
from longmesh.tensor import DTensor
from longmesh.tensor.planner import Planner


@contextlib.contextmanager
def loss_parallel() -> Iterator[None]:
    """Inside, F.cross_entropy of a DTensor sharded along its classes gathers nothing.

    Targets are class indices, plain (whole on every rank) or a DTensor; weights, ignore_index, label smoothing and
    every reduction are those of F.cross_entropy, and so is the result, a DTensor. Local: sends nothing itself.

    >>> _ = torch.manual_seed(0)
    >>> scores, target = torch.randn(3, 7), torch.tensor([1, 6, 0])
    >>> sharded = distribute_tensor(scores, mesh, [Shard(1)])
    >>> with loss_parallel():
    ...     loss = F.cross_entropy(sharded, target)
    >>> torch.allclose(loss.full_tensor(), F.cross_entropy(scores, target))
    True
    """
    with _CrossEntropyMode():
        yield


class _CrossEntropyMode(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.cross_entropy:
            return func(*args, **kwargs)
        weigher = current_weigher(
            func
        )  # a scope of context parallelism weighs means, whichever was entered first
        if weigher is not None:
            return weigher(*args, run=_cross_entropy, **kwargs)
        return _cross_entropy(*args, **kwargs)


def _cross_entropy(
    input: Any,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    if size_average is None and reduce is None and _is_sharded_by_classes(input, target):
        _check(input, target, weight, reduction, label_smoothing)
        mesh = input.device_mesh
        if can_fuse(input, mesh):
            others = [
                t if t is None or isinstance(t, DTensor) else DTensor.from_local(t, mesh)
                for t in (target, weight)
            ]
            return run_fused(_STEP, (ignore_index, reduction, label_smoothing), input, *others)
        return _STEP.run_by_ops(input, target, weight, ignore_index, reduction, label_smoothing)
    return F.cross_entropy(
        input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
    )


def _is_sharded_by_classes(logits: Any, target: torch.Tensor) -> bool:
    """Whether logits are sharded by classes, with nothing pending, and targets are indices."""
    return (
        isinstance(logits, DTensor)
        and logits.ndim > 0
        and logits.is_floating_point()
        and not target.is_floating_point()
        and bool(logits._layout.shard_axes(_class_dim(logits)))
        and not logits._layout.partial_axes
        and not torch.compiler.is_compiling()
    )


def _class_dim(logits: torch.Tensor) -> int:
    return 0 if logits.ndim == 1 else 1


def _check(logits: Any, target: Any, weight: Any, reduction: str, smoothing: float) -> None:
    dim = _class_dim(logits)
    rows = reduced_shape(logits.shape, (dim,), keepdim=False)
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


class _CrossEntropy(FusedStep):
    """Of logits, target and weight, with ignore_index, reduction and label smoothing as options."""

    local_output = False

    def run_by_ops(self, x: Any, *arguments: Any) -> torch.Tensor:
        target, weight, ignored, reduction, smoothing = arguments
        options = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignored}
        with no_torch_functions():  # a loss_parallel() that is still open would come back here
            result: Any = F.cross_entropy(x, target, weight, **options)
        rows = reduced_layout(x._layout, (_class_dim(x),), False, Replicate()).placements
        of_row = {"none": rows, "sum": [Partial() if q.is_shard() else q for q in rows]}
        return result.redistribute(placements=of_row.get(reduction, [Replicate()] * len(rows)))

    def plan_forward(
        self, p: Planner, options: tuple[Any, ...], x: Planned, *parameters: Any
    ) -> tuple[Any, ...]:
        (target, weight), (ignored, reduction, smoothing), dim = parameters, options, _class_dim(x)
        shape = reduced_shape(x.shape, (dim,), keepdim=False)
        rows, pending = (reduced_layout(x._layout, (dim,), False, q) for q in (Replicate(), Partial()))
        target = p.redistribute(target, rows)
        wide: Any = x.to(wide_dtype(x.dtype))
        shifted = wide - p.reduced(wide.amax(dim, keepdim=True))
        weight = None if weight is None else p.local(torch.Tensor.to, p.replicated(weight), wide.dtype)
        terms = p.local(_terms, shifted, target, weight, dim, x.interval(dim), smoothing)
        size = (*shape, 3 if smoothing else 2)
        sums = p.reduced(p.wrap(terms, wide, layout=pending, shape=size))
        made = p.locals(3, _losses, shifted, sums, target, weight, dim, (x.shape[dim], ignored, smoothing))
        loss, share = (p.wrap(part, wide, layout=rows, shape=shape) for part in made[:2])
        divisor = None
        if reduction == "mean":
            loss, divisor = p.reduced(torch.stack([loss.sum(), share.sum()])).unbind()
            loss = loss / divisor
        elif reduction == "sum":
            loss = loss.sum()
        p.local(_refuse_targets, target, x.shape[dim], ignored)
        return loss.to(x.dtype), p.wrap(made[2], wide), share, target, divisor

    def gradients(
        self,
        p: Planner,
        options: tuple[Any, ...],
        needs: tuple[bool, ...],
        given: Layout,
        is_plain: bool,
        grad: Planned,
        *kept: Any,
    ) -> tuple[Any, ...]:
        odds, share, target, divisor, _, weight = kept
        ignored, reduction, smoothing = options
        dim, dtype = _class_dim(odds), grad.dtype
        grad = p.redistribute(grad, share._layout) if reduction == "none" else p.replicated(grad)
        factor: Any = grad.to(odds.dtype)
        factor = factor if divisor is None else factor / divisor
        weight = None if weight is None else p.local(torch.Tensor.to, p.replicated(weight), odds.dtype)
        settings = (odds.shape[dim], ignored, smoothing, odds.interval(dim))
        made = p.local(_gradient, odds, factor, share, target, weight, dim, settings, dtype)
        return p.wrap(made, odds, dtype=dtype), None, None


_STEP = _CrossEntropy()


def _terms(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    dim: int,
    interval: tuple[int, int],
    smoothing: float,
) -> torch.Tensor:
    """What this rank adds to the sums of each row, in a new last dim."""
    picked = x.new_zeros(target.shape)
    if x.shape[dim]:
        place, is_own = _own(target, interval)
        picked = x.gather(dim, place.unsqueeze(dim)).squeeze(dim).masked_fill_(~is_own, 0)
    sums = [x.exp().sum(dim), picked]
    if smoothing:
        sums.append((x * _own_weights(weight, x, dim, interval)).sum(dim))
    return torch.stack(sums, -1)


def _own(target: torch.Tensor, interval: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a row's target is among this rank's classes, 0 if it is not; and whether it is."""
    start, length = interval
    is_own = (target >= start) & (target < start + length)
    return torch.where(is_own, target - start, 0), is_own


def _own_weights(weight: Any, x: torch.Tensor, dim: int, interval: tuple[int, int]) -> torch.Tensor:
    """The weights of this rank's classes, to be multiplied with a tensor shaped as `x`."""
    if weight is None:
        return x.new_ones(())
    return weight.narrow(0, *interval).view(-1, *(1,) * (x.ndim - dim - 1))


def _losses(
    shifted: torch.Tensor,
    sums: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    dim: int,
    settings: tuple[int, int, float],
) -> tuple[torch.Tensor, ...]:
    """Each row's loss, what it counts in a mean (its target's weight, nothing if it is ignored), and the probabilities
    of this rank's classes, in the memory of `shifted`."""
    classes, ignored, smoothing = settings
    lse, is_ignored = sums[..., 0].log(), target == ignored
    if weight is None:
        share = (~is_ignored).to(lse.dtype)
    else:  # what is not a class is refused after the collectives
        share = weight[target.clamp(0, classes - 1)].masked_fill_(is_ignored, 0)
    loss = (lse - sums[..., 1]) * share
    if smoothing:
        total = classes if weight is None else weight.sum()
        loss = loss * (1 - smoothing) + (total * lse - sums[..., 2]) * (smoothing / classes)
    return loss.masked_fill(is_ignored, 0), share, shifted.sub_(lse.unsqueeze(dim)).exp_()


def _gradient(
    odds: torch.Tensor,
    factor: torch.Tensor,
    share: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    dim: int,
    settings: tuple[int, int, float, tuple[int, int]],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Of this rank's logits. `factor`: the gradient of each row's loss."""
    classes, ignored, smoothing, interval = settings
    is_ignored = target == ignored
    rows = (factor * share * (1 - smoothing)).masked_fill(is_ignored, 0)
    even = (factor * (smoothing / classes)).expand(share.shape).masked_fill(is_ignored, 0)
    total = classes if weight is None else weight.sum()
    made = odds * (rows + even * total).unsqueeze(dim)
    if smoothing:
        made = made - even.unsqueeze(dim) * _own_weights(weight, odds, dim, interval)
    if odds.shape[dim]:
        place, is_own = _own(target, interval)
        made.scatter_add_(dim, place.unsqueeze(dim), -(rows * is_own).unsqueeze(dim))
    return made.to(dtype)


def _refuse_targets(target: torch.Tensor, classes: int, ignored: int) -> None:
    bad = ((target < 0) | (target >= classes)) & (target != ignored)
    if not can_read(bad):
        refuse_unread(bad.any(), f"a target is out of bounds for {classes} classes")
    elif bool(bad.any()):
        raise IndexError(f"Target {int(target[bad].flatten()[0])} is out of bounds.")
