"""Cross entropy of a head's logits that never exist all at once.

A mean or a sum has its gradients computed together with it, tile by tile, and scaled when backward() comes: three
products, as the plain loss needs. Losses of single tokens wait for the gradient of each, so their logits are made
again: four. So are those of fp16, which holds neither 1 / labels nor what a GradScaler multiplies by, but both
together.

Pitfall: in a scope of context parallelism a mean is over this rank's labels; give `num_items`, the number of labels of
the whole batch, and sum over ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from longmesh._torch.first_derivative import without_second
from longmesh.errors import LongmeshError
from longmesh.tiles.arguments import head_of
from longmesh.tiles.head import Head, HeadGrads, no_second_derivative
from longmesh.tiles.logprobs import TokenLosses

_NAME = "tiled_cross_entropy"


def tiled_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items: int | Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    mesh: DeviceMesh | None = None,
    tile: int | None = None,
) -> Tensor:
    """F.cross_entropy(F.linear(hidden, weight, bias), labels), with the logits of one tile of tokens in memory.

    `hidden` is (..., size), `weight` (classes, size) and `labels` (...), in any floating type; the loss is fp32, or
    float64 if they are. A mean divides by `num_items`, by default the number of labels that are not `ignore_index`.
    `z_loss` times the squared log-sum-exp of each labelled token is added, and `softcap` bends the logits to
    cap * tanh(logits / cap) first. `tile` is a number of tokens; by default the logits of a tile take 64 MiB.

    With `mesh`, of one axis, the classes are sharded over its ranks: `weight` and `bias` are this rank's rows, any
    number of them, and hidden states and labels are the same on each. Then it is collective, and so is its gradient's
    computation: each rank has the whole gradient of `hidden` and that of its own rows.

    >>> _ = torch.manual_seed(0)
    >>> hidden, weight, labels = torch.randn(6, 4), torch.randn(9, 4), torch.arange(6)
    >>> loss = tiled_cross_entropy(hidden, weight, labels, tile=2)
    >>> torch.allclose(loss, F.cross_entropy(hidden @ weight.T, labels))
    True
    """
    if reduction not in ("mean", "sum", "none"):
        raise LongmeshError(f"{_NAME}(reduction={reduction!r}): use 'mean', 'sum' or 'none'")
    if num_items is not None and reduction != "mean":
        raise LongmeshError(
            f"{_NAME}(num_items=, reduction={reduction!r}): num_items is what a mean divides by; use reduction='mean'"
        )
    head, tokens, flat = head_of(
        _NAME,
        hidden,
        weight,
        labels,
        bias,
        mesh,
        ignore_index=ignore_index,
        smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        tile=tile,
    )
    if reduction == "none":
        return TokenLosses.apply(tokens, head.weight, head.bias, flat, head, _NAME).view(labels.shape)
    divisor = None
    if reduction == "mean":
        count = (flat != ignore_index).sum() if num_items is None else num_items
        divisor = torch.as_tensor(count, device=tokens.device)
    return _Loss.apply(tokens, head.weight, head.bias, flat, divisor, head)


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        divisor: Tensor | None,
        head: Head,
    ) -> Tensor:
        needs = tuple(ctx.needs_input_grad[:3])
        is_later = hidden.dtype is torch.float16
        loss, found = _run(hidden, labels, divisor, head, (False,) * 3 if is_later else needs)
        ctx.grads = None if is_later else found
        ctx.save_for_backward(hidden, weight, bias, labels, divisor)
        ctx.head = head
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, _, _, labels, divisor = ctx.saved_tensors
        # Given away, not copied: they are as large as the weight. A second pass over a retained graph makes them anew.
        found, ctx.grads = ctx.grads, None
        with torch.no_grad():
            if found is None:
                _, scaled = _run(hidden, labels, divisor, ctx.head, tuple(ctx.needs_input_grad[:3]), grads[0])
            else:
                scaled = tuple(None if grad is None else grad.mul_(grads[0].to(grad.dtype)) for grad in found)
        return (*without_second(no_second_derivative(_NAME), scaled), None, None, None)


def _run(
    hidden: Tensor,
    labels: Tensor,
    divisor: Tensor | None,
    head: Head,
    needs: tuple[bool, ...],
    scale: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """The loss, and its gradients times `scale` where they are needed."""
    with torch.autocast(hidden.device.type, enabled=False):
        buffer = head.buffer(len(hidden))
        wide = torch.float64 if hidden.dtype is torch.float64 else torch.float32
        total = torch.zeros((), dtype=wide, device=hidden.device)
        one = torch.ones((), dtype=wide, device=hidden.device)
        factor = (one if scale is None else scale.to(wide)) / (1 if divisor is None else divisor)
        grads = HeadGrads(head, hidden, needs)  # pyright: ignore[reportArgumentType]
        for where in head.tiles(len(hidden)):
            losses, state = head.losses(hidden[where], labels[where], buffer)
            total += losses.sum()
            if any(needs):
                of_tokens = factor.expand(len(losses))
                grads.add(where, hidden[where], head.logit_grads(state, of_tokens))
        loss = total if divisor is None else total / divisor
        return loss, grads.finish() if any(needs) else (None, None, None)
