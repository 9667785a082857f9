"""Losses that need more than one local call.

The mean negative log likelihood is a sum over a total weight, both of the whole: they travel together. CTC
walks every sequence of a batch from end to end, so it runs on whole tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from longmesh.rules.lookup import can_read, refuse_unread
from longmesh.spec import Partial
from longmesh.tensor.dispatch import Handler, dispatch
from longmesh.tensor.dtensor import DTensor
from longmesh.tensor.ops.pieces import bind, reduced, reduced_layout
from longmesh.tensor.plain import on_whole_tensors, replicate_plain

aten = torch.ops.aten

_MEAN, _SUM = 1, 2


def nll(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """nll_loss_forward and nll_loss2d_forward(self, target, weight?, reduction, ignore_index)."""
    if any(isinstance(a, torch.Tensor) and not isinstance(a, DTensor) for a in args):
        args, kwargs = replicate_plain(func, args, kwargs)
    x, target, weight, reduction, ignored = args
    if reduction != _MEAN or (x._layout.is_replicated and target._layout.is_replicated):
        return dispatch.run(func, args, kwargs)
    target, num_wrong = _without_wrong_classes(reduced(target), x.shape[0 if x.ndim == 1 else 1], ignored)
    total, weights = dispatch.run(func, (x, target, weight, _SUM, ignored), {})
    if total._layout is not weights._layout:
        total, weights = reduced(total), reduced(weights)
    terms = [total._local_tensor, weights._local_tensor]
    pending = set(total._layout.partial_axes)
    if num_wrong is not None and pending.issuperset(num_wrong._layout.partial_axes):
        # What is replicated along a pending axis is counted several times: still zero only if there is none.
        terms.append(num_wrong._local_tensor.to(terms[0].dtype))
    elif num_wrong is not None:
        _refuse(reduced(num_wrong)._local_tensor, x, ignored)
    together = DTensor(torch.stack(terms), x._mesh, total._layout, (len(terms),), (1,))
    found = reduced(together)
    total, weights, *flag = (
        DTensor(part.clone(), x._mesh, found._layout, (), ()) for part in found._local_tensor.unbind()
    )
    for wrong in flag:
        _refuse(wrong._local_tensor, x, ignored)
    return total / weights, weights


def _without_wrong_classes(target: DTensor, classes: int, ignored: int) -> tuple[DTensor, DTensor | None]:
    """The target with its impossible classes ignored, and how many there are, a pending sum.

    Only the rank that holds one sees it, and a mean needs everybody: the number travels with the sums, and all
    ranks raise. On an accelerator the kernel itself reports them.
    """
    local = target._local_tensor
    if local.device.type != "cpu":
        return target, None
    wrong = ((local < 0) | (local >= classes)) & (local != ignored)
    layout = reduced_layout(target._layout, range(target.ndim), False, Partial())
    count = DTensor(wrong.sum(), target._mesh, layout, (), ())
    cleaned = local.masked_fill(wrong, ignored)
    return DTensor(cleaned, target._mesh, target._layout, target.shape, target.stride()), count


def _refuse(num_wrong: torch.Tensor, x: DTensor, ignored: int) -> None:
    classes = x.shape[0 if x.ndim == 1 else 1]
    text = f"a target is out of bounds: classes are 0 to {classes - 1}, and {ignored} (ignore_index) for none"
    if can_read(num_wrong) and num_wrong.item():
        raise IndexError(text)
    refuse_unread(num_wrong != 0, text)


def ctc(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """_ctc_loss with lengths that are numbers: torch makes a plain tensor of them for the mean, so they are noted."""
    result = on_whole_tensors(func, args, kwargs)
    result[0]._lengths = [float(max(n, 1)) for n in bind(func, args, kwargs)["target_lengths"]]
    return result


HANDLERS: dict[OpOverload, Handler] = {
    aten.nll_loss_forward.default: nll,
    aten.nll_loss2d_forward.default: nll,
    aten._ctc_loss.default: ctc,
    **dict.fromkeys(
        (
            aten._ctc_loss.Tensor,
            aten._ctc_loss_backward.default,
            aten._ctc_loss_backward.Tensor,
        ),
        on_whole_tensors,
    ),
}
