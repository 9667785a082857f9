"""A finding: one row of the doctor's table, and one entry of its JSON file."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Examination:
    """`problem` is None if all is well. `figures` are the measurements; `advice` is worth reading, but no failure."""

    section: str
    name: str
    figures: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None
    advice: str | None = None


def median_us(call: Callable[[], Any], device: torch.device, times: int = 5) -> float:
    """The median time of a call in microseconds, after one to warm up."""
    took = []
    for _ in range(times + 1):
        start = time.perf_counter()
        call()
        if device.type != "cpu":
            torch.get_device_module(device).synchronize()
        took.append((time.perf_counter() - start) * 1e6)
    return sorted(took[1:])[times // 2]


def worst_difference(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest difference of any two; infinite if anything found is no number, which `max` would pass over."""
    pairs = zip(found, wanted, strict=True)
    return max(float((a.double().cpu() - b).abs().nan_to_num(nan=torch.inf).max()) for a, b in pairs)
