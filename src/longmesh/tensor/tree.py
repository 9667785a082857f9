"""Walk the tensors of an op's arguments: tuples, lists and dicts, nothing else nests there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def map_tensors(fn: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """`value` with every tensor replaced by `fn(tensor)`, in order."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    kind = type(value)
    if kind is tuple or kind is list:
        return kind(map_tensors(fn, v) for v in value)
    if kind is dict:
        return {k: map_tensors(fn, v) for k, v in value.items()}
    if isinstance(value, tuple):  # a named tuple of results
        return tuple(map_tensors(fn, v) for v in value)
    return value


def all_tensors(value: Any) -> list[torch.Tensor]:
    """Every tensor in `value`, in order."""
    found: list[torch.Tensor] = []
    map_tensors(found.append, value)
    return found
