"""The element that leaves a reduction unchanged: what a rank with nothing to add contributes."""

from __future__ import annotations

import torch


def identity_of(reduce_op: str, dtype: torch.dtype) -> float | int | bool:
    """The element that leaves a reduction unchanged."""
    if reduce_op in ("sum", "avg"):
        return 0
    if reduce_op == "product":
        return 1
    if dtype is torch.bool:
        return reduce_op == "min"
    if dtype.is_floating_point:
        return float("inf") if reduce_op == "min" else float("-inf")
    limits = torch.iinfo(dtype)
    return limits.max if reduce_op == "min" else limits.min
