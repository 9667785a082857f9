"""Losses that a user computes inside a scope: a mean over this rank's tokens is no share of that over all.

    F.mse_loss(logits, targets)                                            refused
    F.mse_loss(logits, targets, reduction="sum") / num_of_all_ranks        this rank's share

Pitfall: a mean that is written out (`.mean()`) is not seen.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from longmesh.errors import LongmeshError
from longmesh.hf.open_batch import current_batch, current_inspection, is_gathered

_LOSSES: tuple[Callable[..., Tensor], ...] = (
    F.cross_entropy,
    F.nll_loss,
    F.kl_div,
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.cosine_embedding_loss,
)


def unless_gathered(shared: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """F.cross_entropy of this rank's part as `shared` computes it; of gathered logits torch's own."""

    def compute(*args: Any, **kwargs: Any) -> Tensor:
        return F.cross_entropy(*args, **kwargs) if is_gathered() else shared(*args, **kwargs)

    return compute


def _refuse_mean(func: Callable[..., Tensor]) -> Callable[..., Tensor]:
    signature = inspect.signature(func)

    def compute(*args: Any, **kwargs: Any) -> Tensor:
        batch = current_batch()
        if is_gathered() or batch is None or batch.in_model or current_inspection() is not None:
            return func(*args, **kwargs)  # a model's loss is looked at when it returns
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        reduction, value = given.arguments["reduction"], args[0] if args else kwargs["input"]
        # A batch of rows has as many on every rank; tokens that were flattened into the first dim have not.
        if reduction == "mean" or (reduction == "batchmean" and value.ndim < 3):
            raise LongmeshError(
                f"{func.__name__}(reduction={reduction!r}) inside hf.context_parallel: a mean over this rank's tokens "
                "is not its share of that over all; give the batch labels and take the model's loss, use "
                "longmesh.attention.cut_cross_entropy, or reduction='sum' and divide by the number of all ranks' tokens"
            )
        return func(*args, **kwargs)

    return compute


HANDLERS = {func: _refuse_mean(func) for func in _LOSSES}
