"""What models with experts call on a GPU and not on a CPU: counts of whole numbers by `histc`, products of groups of
rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from longmesh._torch import aten


def _histc(given: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Counts of whole numbers are whole, as on a GPU; a CPU has `histc` for floats only."""
    if given.dtype.is_floating_point:
        return aten.histc.default(given, bins, min, max)
    return aten.histc.default(given.double(), bins, min, max).to(given.dtype)


def _grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Of hollow tensors the sizes, in any dtype: torch's own function for these takes bf16 alone."""
    if not a.is_meta:
        return aten._grouped_mm.default(a, b, offs, bias, out_dtype)
    groups = [t.shape[0] for t in (a, b) if t.ndim == 3][:1]
    if a.ndim == b.ndim == 2 and offs is not None:
        groups = [offs.shape[0]]
    shape = (a.shape[-2], b.shape[-1]) if a.ndim != b.ndim else (*groups, a.shape[-2], b.shape[-1])
    return a.new_empty(shape, dtype=out_dtype or a.dtype)


STAND_INS: dict[Any, Callable[..., Any]] = {
    aten.histc.default: _histc,
    aten._grouped_mm.default: _grouped_mm,
}
