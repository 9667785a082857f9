"""A model's own cross entropy inside a scope: this rank's share of the mean over all labels.

A model that averages its loss by itself averages over this rank's tokens, and one that shifts labels by itself misses
the successor that is on another rank. Both are seen where they end: in F.cross_entropy.

A mean that a user computes inside a scope, with a loss of torch, is refused: it is no share of that over all.

    F.mse_loss(logits, targets)                                            refused
    F.mse_loss(logits, targets, reduction="sum") / num_of_all_ranks        this rank's share

Pitfall: a mean that is written out (`.mean()`) is not seen.

Pitfall: one rank's numbers may not tell which labels a model took: where all labels are the same, those that follow
are, too. So what fits must fit on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from longmesh.attention.scope.mean_loss import LOSSES, LossCall, names_of, reduction_of
from longmesh.errors import LongmeshError
from longmesh.hf.ranks_agree import true_everywhere
from longmesh.hf.state import current

IGNORED = -100


class SharedLoss:
    """F.cross_entropy on the labels of an open scope, of which `labels` and `following` are this rank's part.

    `labels` and `padding` (1 for tokens, 0 for padding, or None) are those of the whole batch, the same on all ranks
    of the `mesh` (None: one process). `part_of(tensor, dim)`: this rank's part of one.
    `in_model`: a model runs, whose targets must be known.
    """

    def __init__(
        self,
        part_of: Callable[[Tensor, int], Tensor],
        labels: Tensor,
        padding: Tensor | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        following = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        _check_predicted_by_tokens(following, padding)
        self._labels_padding = padding is not None and bool(((labels != IGNORED) & (padding == 0)).any())
        self.labels, self.following = part_of(labels, 1), part_of(following, 1)
        self._num_following = (following != IGNORED).sum()
        self._num_labels = (labels != IGNORED).sum()
        self._num_items, self._counts_all = self._num_following.clone(), False
        self._mesh = mesh
        self.in_model = False
        # Cross entropies since a model began to run: the value, and whether it is a mean.
        self._seen: list[tuple[Tensor, bool]] = []

    def enter_model(self) -> None:
        self.in_model, self._seen = True, []

    @property
    def was_called(self) -> bool:
        """Whether the model that runs, or ran last, has computed a cross entropy."""
        return bool(self._seen)

    def see_log_probs(self, output: Any) -> None:
        """Take the log-probabilities that a model with a fused head returns, one for each of this rank's tokens, for
        its cross entropy: TRL's heads compute none."""
        found = getattr(output, "log_probs", None)
        if not self.was_called and isinstance(found, Tensor) and found.shape == self.following.shape:
            self._seen.append((-found.detach().sum(), False))

    def is_all_of(self, loss: Tensor, num_items: Tensor | int | None) -> bool:
        """Whether a model's loss is the cross entropy that it has computed, divided by `num_items` where it was no
        mean."""
        count = self._num_items if num_items is None else torch.as_tensor(num_items)
        shares = [value if is_mean else value / count.to(value.device) for value, is_mean in self._seen]
        is_wide = loss.dtype in (torch.float32, torch.float64)
        return torch.allclose(
            loss.detach().double(),
            torch.stack(shares).double().sum(),
            rtol=1e-5 if is_wide else 1e-2,
            atol=1e-6,
            equal_nan=True,
        )

    def divide_by(self, following: Tensor, labels: Tensor) -> None:
        """Other numbers of labels to divide by, those of more than this batch: `following` for a model that shifts
        labels, `labels` for one that does not."""
        self._num_following, self._num_labels = following, labels
        self._num_items, self._counts_all = following.clone(), False

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
        kwargs: dict[str, Any] = {"weight": weight, "label_smoothing": label_smoothing}
        reduction = reduction_of(reduction, size_average, reduce)
        is_mean = reduction == "mean"
        known = self._known(target)
        if known is None and (is_mean or self.in_model):
            raise LongmeshError(
                f"a cross entropy on {target.numel()} targets inside hf.context_parallel, which are not this rank's "
                f"{self.labels.numel()} labels: made from this rank's part, it would be wrong; compute the loss from "
                "the logits, with longmesh.attention.cut_cross_entropy"
            )
        if known is None:
            kwargs["ignore_index"] = ignore_index
            return torch.nn.functional.cross_entropy(input, target, reduction=reduction, **kwargs)
        if ignore_index != IGNORED or (is_mean and weight is not None):
            raise LongmeshError(
                "a cross entropy with class weights or an ignore_index of its own inside hf.context_parallel, where "
                f"labels of {IGNORED} are those that don't count: compute the loss from the logits, with "
                "longmesh.attention.cut_cross_entropy"
            )
        target, counts_all = known
        count = self._num_labels if counts_all else self._num_following
        if is_mean:
            total = torch.nn.functional.cross_entropy(input, target, reduction="sum", **kwargs)
            mean = total / count.to(total.device)
            self._seen.append((mean.detach(), True))
            return mean
        if counts_all != self._counts_all:
            # What a model divides by after this call: one that does not shift labels has other ones to count.
            self._num_items.copy_(count)
            self._counts_all = counts_all
        found = torch.nn.functional.cross_entropy(input, target, reduction=reduction, **kwargs)
        self._seen.append((found.detach().sum(), False))
        return found

    def _known(self, target: Tensor) -> tuple[Tensor, bool] | None:
        """The targets as they are on the whole sequence, and whether a row's first counts; None if these are others.
        Collective, unless the targets are in the memory of what the scope yielded."""
        match self._kind(target):
            case "following":
                return target, False
            case "shifted here":
                return self.following.reshape(target.shape), False
            case "labels":
                if self._labels_padding:
                    raise LongmeshError(
                        "hf.context_parallel: padding has labels, and this model does not shift labels, so it predicts "
                        "them from padding; set the labels of padding to -100"
                    )
                return target, True
        return None

    def _kind(self, target: Tensor) -> str | None:
        """Which labels a model took: the same answer on every rank. By their memory, or, since models shift labels and
        DDP copies what a model is given, by their numbers on all ranks."""
        here = torch.nn.functional.pad(self.labels[:, 1:], (0, 1), value=IGNORED)
        kinds = {"following": self.following, "labels": self.labels, "shifted here": here}
        for kind, labels in kinds.items():
            if target.numel() == labels.numel() and _share_memory(target, labels):
                return kind
        fits = torch.tensor([_are_equal(target, labels) for labels in kinds.values()], device=target.device)
        fitting = true_everywhere(fits, self._mesh).tolist()
        return next((kind for kind, is_fitting in zip(kinds, fitting, strict=True) if is_fitting), None)


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


def _share_memory(first: Tensor, second: Tensor) -> bool:
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def _are_equal(target: Tensor, labels: Tensor) -> bool:
    return target.numel() == labels.numel() and bool((target.flatten() == labels.flatten()).all())


def refuse_mean(func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise for a mean over this rank's tokens: it is no share of that over all."""
    call = LossCall(func, names_of(func), args, kwargs)
    # A batch of rows has as many on every rank; tokens that were flattened into the first dim have not.
    if call.reduction == "mean" or (call.reduction == "batchmean" and call.first.ndim < 3):
        raise LongmeshError(
            f"{func.__name__}(reduction={call.reduction!r}) inside hf.context_parallel: a mean over this rank's "
            "tokens is not its share of that over all; give the batch labels and take the model's loss, use "
            "longmesh.attention.cut_cross_entropy, or reduction='sum' and divide by the number of all ranks' tokens"
        )


def _handled(func: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args, **kwargs: current().mean(func, args, kwargs)


HANDLERS: dict[Callable[..., Any], Callable[..., Any]] = {
    **{func: _handled(func) for func in LOSSES},
    F.cross_entropy: lambda *args, **kwargs: current().cross_entropy(args, kwargs),
}
