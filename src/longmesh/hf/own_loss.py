"""Losses that a user computes inside a scope: a mean over this rank's tokens is no share of that over all.

    F.mse_loss(logits, targets)                                            refused
    F.mse_loss(logits, targets, reduction="sum") / num_of_all_ranks        this rank's share

Pitfall: a mean that is written out (`.mean()`) is not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from longmesh.attention.scope.mean_loss import LOSSES, LossCall, names_of
from longmesh.errors import LongmeshError
from longmesh.hf.open_batch import current_batch, current_inspection, is_gathered


def unless_gathered(shared: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """F.cross_entropy of this rank's part as `shared` computes it; of gathered logits torch's own."""

    def compute(*args: Any, **kwargs: Any) -> Tensor:
        return F.cross_entropy(*args, **kwargs) if is_gathered() else shared(*args, **kwargs)

    return compute


def _refuse_mean(func: Callable[..., Tensor]) -> Callable[..., Tensor]:
    names = names_of(func)

    def compute(*args: Any, **kwargs: Any) -> Tensor:
        batch = current_batch()
        if is_gathered() or batch is None or batch.in_model or current_inspection() is not None:
            return func(*args, **kwargs)  # a model's loss is looked at when it returns
        call = LossCall(func, names, args, kwargs)
        # A batch of rows has as many on every rank; tokens that were flattened into the first dim have not.
        if call.reduction == "mean" or (call.reduction == "batchmean" and call.first.ndim < 3):
            raise LongmeshError(
                f"{func.__name__}(reduction={call.reduction!r}) inside hf.context_parallel: a mean over this rank's "
                "tokens is not its share of that over all; give the batch labels and take the model's loss, use "
                "longmesh.attention.cut_cross_entropy, or reduction='sum' and divide by the number of all ranks' tokens"
            )
        return func(*args, **kwargs)

    return compute


HANDLERS = {func: _refuse_mean(func) for func in LOSSES}
