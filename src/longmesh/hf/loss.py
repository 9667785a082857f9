"""A model's own cross entropy inside a scope: this rank's share of the mean over all labels.

A model that averages its loss by itself averages over this rank's tokens, and one that shifts labels by itself misses
the successor that is on another rank. Both are seen where they end: in F.cross_entropy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longmesh.attention.engine.context_parallel import ContextParallel
from longmesh.errors import LongmeshError

IGNORED = -100


class SharedLoss:
    """F.cross_entropy on the labels of an open scope, of which `labels` and `following` are this rank's part.

    `labels` and `padding` (1 for tokens, 0 for padding, or None) are those of the whole batch, the same on all ranks.
    """

    def __init__(self, engine: ContextParallel, labels: Tensor, padding: Tensor | None = None) -> None:
        following = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        _check_predicted_by_tokens(following, padding)
        self._labels_padding = padding is not None and bool(((labels != IGNORED) & (padding == 0)).any())
        self.labels, self.following = engine.shard(labels, 1), engine.shard(following, 1)
        self._num_following = (following != IGNORED).sum()
        self._num_labels = (labels != IGNORED).sum()
        self._num_items = self._num_following.clone()

    def divide_by(self, following: Tensor, labels: Tensor) -> None:
        """Other numbers of labels to divide by, those of more than this batch: `following` for a model that shifts
        labels, `labels` for one that does not."""
        self._num_following, self._num_labels = following, labels
        self._num_items = following.clone()

    def part(self) -> dict[str, Tensor]:
        """What to call a model with."""
        return {
            "labels": self.labels,
            "shift_labels": self.following,
            "num_items_in_batch": self._num_items,
        }

    def __call__(
        self,
        input: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = IGNORED,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        kwargs: dict[str, Any] = {
            "weight": weight,
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
        }
        if reduction != "mean" or size_average is not None or reduce is not None:
            is_unshifted = _is(target, self.labels)
            # What a model divides by after this call: one that does not shift labels has other ones to count.
            self._num_items.copy_(self._num_labels if is_unshifted else self._num_following)
            if not is_unshifted and not _is(target, self.following) and _is_shifted_here(target, self.labels):
                target = self.following.reshape(target.shape)
            return torch.nn.functional.cross_entropy(input, target, reduction=reduction, **kwargs)
        target, count = self._known(target)
        if weight is not None or ignore_index != IGNORED:
            raise LongmeshError(
                "a mean cross entropy with class weights or an ignore_index of its own inside hf.context_parallel: "
                "compute the loss from the logits, with longmesh.attention.cut_cross_entropy"
            )
        total = torch.nn.functional.cross_entropy(input, target, reduction="sum", **kwargs)
        return total / count.to(total.device)

    def _known(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """The targets as they are on the whole sequence, and how many of them count."""
        if _is(target, self.following):
            return target, self._num_following
        if _is(target, self.labels):
            if self._labels_padding:
                raise LongmeshError(
                    "hf.context_parallel: padding has labels, and this model does not shift labels, so it predicts "
                    "them from padding; set the labels of padding to -100"
                )
            return target, self._num_labels
        if _is_shifted_here(target, self.labels):
            return self.following.reshape(target.shape), self._num_following
        raise LongmeshError(
            f"a mean cross entropy on {target.numel()} targets inside hf.context_parallel, which are not this rank's "
            f"{self.labels.numel()} labels: a mean over this rank's part would be wrong; compute the loss from the "
            "logits, with longmesh.attention.cut_cross_entropy"
        )


def _check_predicted_by_tokens(following: Tensor, padding: Tensor | None) -> None:
    """Refuse labels that are predicted from padding: attention implementations differ in what padding sees."""
    if padding is None:
        return
    from_padding = (following != IGNORED) & (padding == 0)
    if bool(from_padding.any()):
        row, token = from_padding.nonzero()[0].tolist()
        raise LongmeshError(
            f"hf.context_parallel: the label of token {token + 1} of row {row} would be predicted from padding (token "
            f"{token}), and what padding sees differs between attention implementations; pad on the right "
            "(padding_side='right') with labels of -100, or set the label of the token after padding to -100"
        )


def _is(target: Tensor, labels: Tensor) -> bool:
    """Whether these are the labels, in their order: the same memory."""
    return (
        target.numel() == labels.numel()
        and target.untyped_storage().data_ptr() == labels.untyped_storage().data_ptr()
    )


def _is_shifted_here(target: Tensor, labels: Tensor) -> bool:
    """Whether these are the labels shifted by one within this rank's part."""
    if target.numel() != labels.numel():
        return False
    here = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
    return bool((target.flatten() == here.flatten()).all())
