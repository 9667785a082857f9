"""Losses that need more than one local call.

The mean negative log likelihood is a sum over a total weight, both of the whole: they travel together. CTC
walks every sequence of a batch from end to end, so it runs on whole tensors.
"""

from __future__ import annotations

from typing import Any

import torch

from longmesh._torch import OpOverload, aten
from longmesh.rules.lookup import can_read, refuse_unread
from longmesh.spec import Partial
from longmesh.tensor.make_plan import Family
from longmesh.tensor.op_facts import bind
from longmesh.tensor.ops.pieces import reduced_layout
from longmesh.tensor.plain import expect_lengths
from longmesh.tensor.planned import Planned
from longmesh.tensor.planner import Planner

_MEAN, _SUM = 1, 2


def nll(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """nll_loss_forward and nll_loss2d_forward(self, target, weight?, reduction, ignore_index)."""
    x, target, weight, reduction, ignored = args
    if reduction != _MEAN or (x._layout.is_replicated and target._layout.is_replicated):
        return p.by_rule(func, args, kwargs)
    classes = x.shape[0 if x.ndim == 1 else 1]
    target, num_wrong = _without_wrong_classes(p, p.reduced(target), classes, ignored)
    total, weights = p.by_rule(func, (x, target, weight, _SUM, ignored), {})
    if total._layout is not weights._layout:
        total, weights = p.reduced(total), p.reduced(weights)
    terms: list[Any] = [total, weights]
    pending = set(total._layout.partial_axes)
    if num_wrong is not None and pending.issuperset(num_wrong._layout.partial_axes):
        # What is replicated along a pending axis is counted several times: still zero only if there is none.
        terms.append(p.local(torch.Tensor.to, num_wrong, total.dtype))
    elif num_wrong is not None:
        p.local(_refuse, p.reduced(num_wrong), classes, ignored)
    together = p.reduced(p.wrap(p.local(torch.stack, terms), total, shape=(len(terms),)))
    has_flag = len(terms) > 2

    def divide(sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if has_flag:
            _refuse(sums[2], classes, ignored)
        return sums[0] / sums[1], sums[1].clone()

    loss, count = p.locals(2, divide, together)
    return p.wrap(loss, together, shape=()), p.wrap(count, together, shape=())


def _without_wrong_classes(
    p: Planner, target: Planned, classes: int, ignored: int
) -> tuple[Planned, Planned | None]:
    """The target with its impossible classes ignored, and how many there are, a pending sum.

    Only the rank that has one sees it, and a mean needs everybody: the number travels with the sums, and all
    ranks raise. On an accelerator the kernel itself reports them.
    """
    if p.device.type != "cpu":
        return target, None

    def clean(local: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wrong = ((local < 0) | (local >= classes)) & (local != ignored)
        return local.masked_fill(wrong, ignored), wrong.sum()

    cleaned, count = p.locals(2, clean, target)
    layout = reduced_layout(target._layout, range(target.ndim), False, Partial())
    return p.wrap(cleaned, target), p.wrap(count, target, layout=layout, shape=(), dtype=torch.int64)


def _refuse(num_wrong: torch.Tensor, classes: int, ignored: int) -> None:
    text = f"a target is out of bounds: classes are 0 to {classes - 1}, and {ignored} (ignore_index) for none"
    if can_read(num_wrong) and num_wrong.item():
        raise IndexError(text)
    refuse_unread(num_wrong != 0, text)


def ctc(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """_ctc_loss with lengths that are numbers: torch divides by a plain tensor that it makes of them."""
    count = len(bind(func, args, kwargs)["target_lengths"])
    p.after = lambda result: expect_lengths(result[0], count)
    return p.on_whole_tensors(func, args, kwargs)


FAMILIES: dict[OpOverload, Family] = {
    aten.nll_loss_forward.default: nll,
    aten.nll_loss2d_forward.default: nll,
    aten._ctc_loss.default: ctc,
}
