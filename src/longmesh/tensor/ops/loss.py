"""Losses that need more than one local call.

The mean negative log likelihood is a sum over a total weight, both of the whole: they travel together. CTC
walks every sequence of a batch from end to end, so it runs on whole tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from longmesh.tensor.dispatch import Handler, dispatch, replicate_plain
from longmesh.tensor.dtensor import DTensor
from longmesh.tensor.ops.data_dependent import on_whole_tensors
from longmesh.tensor.ops.pieces import settled

aten = torch.ops.aten

_MEAN, _SUM = 1, 2


def nll(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """nll_loss_forward and nll_loss2d_forward(self, target, weight?, reduction, ignore_index)."""
    if any(isinstance(a, torch.Tensor) and not isinstance(a, DTensor) for a in args):
        args, kwargs = replicate_plain(func, args, kwargs)
    x, target, weight, reduction, ignored = args
    if reduction != _MEAN or (x._layout.is_replicated and target._layout.is_replicated):
        return dispatch.run(func, args, kwargs)
    total, weights = dispatch.run(func, (x, target, weight, _SUM, ignored), {})
    if total._layout is not weights._layout:
        total, weights = settled(total), settled(weights)
        return total / weights, weights
    both = torch.stack([total._local_tensor, weights._local_tensor])
    whole = settled(DTensor(both, x._mesh, total._layout, (2,), (1,)))
    total, weights = (
        DTensor(part.clone(), x._mesh, whole._layout, (), ()) for part in whole._local_tensor.unbind()
    )
    return total / weights, weights


HANDLERS: dict[OpOverload, Handler] = {
    aten.nll_loss_forward.default: nll,
    aten.nll_loss2d_forward.default: nll,
    **dict.fromkeys(
        (
            aten._ctc_loss.default,
            aten._ctc_loss.Tensor,
            aten._ctc_loss_backward.default,
            aten._ctc_loss_backward.Tensor,
        ),
        on_whole_tensors,
    ),
}
