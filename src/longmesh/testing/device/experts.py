"""What models with experts call on a GPU and not on a CPU: counts of whole numbers by `histc`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _histc(given: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Counts of whole numbers are whole, as on a GPU; a CPU has `histc` for floats only."""
    if given.dtype.is_floating_point:
        return aten.histc.default(given, bins, min, max)
    return aten.histc.default(given.double(), bins, min, max).to(given.dtype)


STAND_INS: dict[Any, Callable[..., Any]] = {aten.histc.default: _histc}
