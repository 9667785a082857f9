"""Ops whose result's shape depends on values: inputs are gathered, every rank computes the same, replicated result.

So that nobody's shape differs: a shape decided by one rank's part would make the next collective hang.
"""

from __future__ import annotations

import torch
from torch._ops import OpOverload

from longmesh.tensor.dispatch import Handler
from longmesh.tensor.plain import on_whole_tensors

aten = torch.ops.aten


HANDLERS: dict[OpOverload, Handler] = dict.fromkeys(
    (
        aten.nonzero.default,
        aten.nonzero_static.default,
        aten.masked_select.default,
        aten.masked_scatter.default,
        aten.masked_scatter_backward.default,
        aten._unique.default,
        aten._unique2.default,
        aten.unique_dim.default,
        aten.unique_consecutive.default,
        aten.unique_dim_consecutive.default,
        aten.repeat_interleave.Tensor,
        aten.bincount.default,
    ),
    on_whole_tensors,
)
