"""Writes to expanded tensors: refused on every rank or on none."""

from __future__ import annotations

from typing import Any

import torch

from longmesh._torch import OpOverload, schema_of
from longmesh.errors import LongmeshError
from longmesh.tensor.dtensor import DTensor
from longmesh.tensor.op_facts import written_arguments
from longmesh.tensor.tree import all_tensors

# Writing the same value to one place several times is writing it once; parts of a pending reduction hold other values.
_IDEMPOTENT = ("aten::fill_", "aten::zero_")


def refuse_overlap(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise for a write to an expanded tensor, as plain torch does, whose check sees a rank's own part only: of one row
    or none it would pass."""
    if torch.Tag.inplace_view in func.tags:
        return
    for tensor in all_tensors(written_arguments(func, args, kwargs)):
        if not isinstance(tensor, DTensor) or not tensor._tensor_layout.is_expanded:
            continue
        if schema_of(func).name not in _IDEMPOTENT or tensor._layout.partial_axes:
            raise LongmeshError(
                f"{func} writes to an expanded tensor of shape {tuple(tensor.shape)} and stride {tensor.stride()}: "
                "several of its elements are one place in memory; clone() it first"
            )
