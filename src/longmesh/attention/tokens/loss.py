"""Cross entropy over a sequence that is cut over ranks: the mean of all tokens, not the mean of the ranks' means.

    rank 0   3 tokens, sum 6.0  \\                       / 7.0 / 4 = 1.75     each rank's gradient is that of its own
    rank 1   1 token,  sum 1.0  /  one sum of 3 numbers  \\ 7.0 / 4 = 1.75     tokens: the sum over ranks is the whole's

Pitfall: parameter gradients are *summed* over the ranks, never averaged; what averages them (DDP, FSDP2) needs the loss
times the number of ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from longmesh.attention.tokens.add_up import add_up
from longmesh.attention.tokens.packing import IGNORED
from longmesh.comm import comm_of
from longmesh.errors import LongmeshError


def cut_cross_entropy(
    logits: Tensor, labels: Tensor, mesh: DeviceMesh, *, ignore_index: int = IGNORED, reduction: str = "mean"
) -> Tensor:
    """The mean (or "sum") of the cross entropy over the tokens of all ranks of `mesh`, the same number on each.

    The ranks of the mesh hold different tokens: leave out an axis whose ranks hold the same. `logits` (..., classes)
    and `labels` (...) are this rank's tokens, any number of them; labels are those of the whole sequence, shifted
    before it was cut (see `pack_documents`). Collective over all axes of the mesh; backward is not: it gives each rank
    the gradient of its own tokens' part, to be summed over ranks.

    >>> _ = torch.manual_seed(0)
    >>> logits, labels = torch.randn(5, 7), torch.arange(5)  # whole, to compare
    >>> mine = slice(0, 3) if mesh.get_local_rank() == 0 else slice(3, 5)
    >>> loss = cut_cross_entropy(logits[mine], labels[mine], mesh)
    >>> torch.allclose(loss, F.cross_entropy(logits, labels))
    True
    """
    if reduction not in ("mean", "sum"):
        raise LongmeshError(f"cut_cross_entropy(reduction={reduction!r}): use 'mean' or 'sum'")
    problem: Exception | None = None
    part = logits.new_zeros((), dtype=torch.float32)
    count = part
    try:
        part, count = _sum_and_count(logits, labels, ignore_index)
    except Exception as error:  # the others are told before it is raised, or they would wait
        problem = error
    sums = add_up("cut_cross_entropy", (part, count), problem, comm_of(mesh))
    total = _StandIn.apply(part, sums[0].to(part.dtype))
    return total if reduction == "sum" else total / sums[1].to(part.dtype)  # NaN of nothing, as torch's mean


def _sum_and_count(logits: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    if logits.ndim < 2 or logits.shape[:-1] != labels.shape:
        raise LongmeshError(
            f"cut_cross_entropy: logits are {tuple(logits.shape)} and labels {tuple(labels.shape)}; give logits "
            "(..., classes) and a label for each token, labels of the same shape without the classes"
        )
    wide = logits if logits.dtype is torch.float64 else logits.float()
    flat = labels.reshape(-1)
    total = F.cross_entropy(wide.flatten(0, -2), flat, ignore_index=ignore_index, reduction="sum")
    return total, (flat != ignore_index).sum()


class _StandIn(torch.autograd.Function):
    """The value of `whole` with the gradient of `part`, which is one of its terms."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, whole: Tensor) -> Tensor:
        return whole.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grads[0], None
