"""Mean losses inside a scope of context parallelism: the average over ranks is the mean over the tokens of all ranks.

    rank 0   3 labels, sum 6.0     6.0 / (4 / 2 ranks) = 3.0  \\
    rank 1   1 label,  sum 1.0     1.0 / (4 / 2 ranks) = 0.5  /  average 1.75 = 7.0 / 4; of the ranks' own means: 1.5

DDP and FSDP2 average gradients over ranks, so each rank's mean is divided by the mean number of labels of a rank, not
by its own. Ranks with as many labels each, or with the same ones (a loss that is not over tokens), get what torch
computes. How many labels count is one small all-reduce, which every mean inside a scope takes part in: by the call
alone no rank can tell whether other ranks have as many.

Pitfall: a mean that is written out (`.mean()`) is not seen.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from longmesh._torch import is_batched
from longmesh.attention.tokens.add_up import add_up
from longmesh.comm import MeshComm, kept_by_mesh
from longmesh.errors import LongmeshError

Loss = Callable[..., Tensor]

# Means over labels that count, each as often as the weight of its class says.
_OF_LABELS: tuple[Loss, ...] = (F.cross_entropy, F.nll_loss, F.linear_cross_entropy)
# Means over elements or samples.
_OF_VALUES: tuple[Loss, ...] = (
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.cosine_embedding_loss,
    F.gaussian_nll_loss,
    F.hinge_embedding_loss,
    F.huber_loss,
    F.kl_div,
    F.l1_loss,
    F.margin_ranking_loss,
    F.mse_loss,
    F.multi_margin_loss,
    F.multilabel_margin_loss,
    F.multilabel_soft_margin_loss,
    F.poisson_nll_loss,
    F.smooth_l1_loss,
    F.soft_margin_loss,
    F.triplet_margin_loss,
    F.triplet_margin_with_distance_loss,
)
LOSSES = (*_OF_LABELS, *_OF_VALUES)
# Divided by the sum of `weight`, where one is given for each element.
_DIVIDED_BY_WEIGHT = (F.mse_loss, F.l1_loss)


class LossCall:
    """The arguments of a call of a loss by name, and the reduction that it asks for, in torch's old spelling too.
    `run` computes it, if `func` itself does not."""

    def __init__(
        self,
        func: Loss,
        names: tuple[str, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: Loss | None = None,
    ) -> None:
        self.func, self._run = func, run or func
        self.given: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
        old = {name: self.given.pop(name, None) for name in ("size_average", "reduce")}
        self.reduction = reduction_of(self.given.pop("reduction", "mean"), **old)

    @property
    def first(self) -> Tensor:
        return next(iter(self.given.values()))

    def run(self, reduction: str) -> Tensor:
        return self._run(**self.given, reduction=reduction)


def reduction_of(reduction: str, size_average: bool | None, reduce: bool | None) -> str:
    """What a loss reduces its values by; `size_average` and `reduce` are torch's old spelling of it."""
    if size_average is None and reduce is None:
        return reduction
    return "none" if reduce is False else "sum" if size_average is False else "mean"


def names_of(func: Loss) -> tuple[str, ...]:
    """The names of a loss's arguments, in order."""
    return tuple(inspect.signature(func).parameters)


@kept_by_mesh(1)
def loss_handlers(comm: MeshComm) -> dict[Loss, Loss]:
    """Torch's losses, and what computes each inside a scope over this mesh. `run=` computes it in another way."""
    found = {func: _weighted(func, names_of(func), comm) for func in LOSSES}
    return {**found, F.ctc_loss: _refuse_ctc}


def _weighted(func: Loss, names: tuple[str, ...], comm: MeshComm) -> Loss:
    def compute(*args: Any, run: Loss = func, **kwargs: Any) -> Tensor:
        call = LossCall(func, names, args, kwargs, run)
        is_mean = call.reduction == "mean" or call.reduction == "batchmean"
        if not is_mean or comm.shape.size() == 1 or call.first.ndim == 0:
            return run(*args, **kwargs)
        if call.reduction == "batchmean" and call.first.ndim > 2:
            raise LongmeshError(
                f"{func.__name__}(reduction='batchmean') of a tensor of {call.first.ndim} dims inside a scope of "
                "context parallelism: it sums over this rank's tokens, and the average of such sums over ranks is too "
                "small; flatten tokens into the first dim, or use reduction='sum', divide by the rows and multiply by "
                "the ranks"
            )
        return _share(call, comm)

    return compute


def _share(call: LossCall, comm: MeshComm) -> Tensor:
    """The sum over this rank's labels, divided by the mean number of labels of a rank. Collective."""
    if torch.compiler.is_compiling():
        losses, count = _losses_and_count(call)
        problem = None
    else:
        losses = count = torch.zeros((), device=call.first.device)
        problem: Exception | None = None
        try:
            losses, count = _losses_and_count(call)
        except Exception as error:  # the others are told before it is raised, or they would wait
            problem = error
    (all_counts,) = add_up(call.func.__name__, (count,), problem, comm)
    total = losses.sum(dtype=_wide(losses.dtype))
    return (total / (all_counts / comm.shape.size()).to(total.dtype)).to(losses.dtype)


def _losses_and_count(call: LossCall) -> tuple[Tensor, Tensor]:
    """Losses of this rank whose sum is that of its labels, and what a mean over these is divided by."""
    if call.func in _OF_LABELS:
        # The sum of half precision numbers may be out of their range.
        is_wide = call.first.dtype == _wide(call.first.dtype)
        return call.run("sum" if is_wide else "none"), _plain(_count_labels(**call.given))
    losses = call.run("none")
    if not losses.dtype.is_floating_point:
        call.run("mean")  # raises: torch has no mean of integers
    weight = call.given.get("weight")
    if weight is not None and call.func in _DIVIDED_BY_WEIGHT:
        return losses, _plain(weight.sum(dtype=torch.float64))
    count = call.first.shape[0] if call.reduction == "batchmean" else losses.numel()
    return losses, torch.full((), count, dtype=torch.float64, device=losses.device)


def _count_labels(
    target: Tensor, weight: Tensor | None = None, ignore_index: int | None = None, **_: Any
) -> Tensor:
    if target.is_floating_point():  # of classes' probabilities all count
        num_classes = target.shape[1 if target.ndim > 1 else 0]
        count = target.numel() / max(num_classes, 1)
        return torch.full((), count, dtype=torch.float64, device=target.device)
    counts = target != (-100 if ignore_index is None else ignore_index)
    if weight is None:
        return counts.sum()
    return weight.double()[target.where(counts, 0)].where(counts, 0).sum()


def _plain(count: Tensor) -> Tensor:
    """A number that ranks can add up: of a DTensor (on another axis) that of the whole."""
    if not torch.compiler.is_compiling() and is_batched(count):
        raise LongmeshError(
            "a mean loss under torch.vmap inside a scope of context parallelism: each sample has labels of its own, "
            "whose numbers ranks can't add up; use reduction='sum' and divide by the number of labels of all ranks"
        )
    return cast(Any, count).full_tensor() if hasattr(count, "full_tensor") else count


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _refuse_ctc(*args: Any, **kwargs: Any) -> Tensor:
    raise LongmeshError(
        "ctc_loss inside a scope of context parallelism would align this rank's tokens alone; gather the log "
        "probabilities with context_parallel_unshard or ContextParallel.unshard and call it outside the scope"
    )
