"""Walk the tensors of an op's arguments: tuples, lists and dicts, nothing else nests there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

# What most arguments are besides tensors: known at a glance.
_LEAVES = frozenset((int, float, bool, type(None), str, torch.dtype, torch.device))


def map_tensors(fn: Callable[[Any], Any], value: Any) -> Any:
    """`value` with every tensor replaced by `fn(tensor)`, in order."""
    kind: Any = type(value)  # pyright: ignore[reportUnknownVariableType]
    if kind in _LEAVES:
        return value
    if kind is tuple:
        return tuple([v if type(v) in _LEAVES else map_tensors(fn, v) for v in value])
    if kind is list:
        return [v if type(v) in _LEAVES else map_tensors(fn, v) for v in value]
    if kind is dict:
        return {k: map_tensors(fn, v) for k, v in value.items()}
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, tuple):  # a named tuple of results
        members: tuple[Any, ...] = value  # pyright: ignore[reportUnknownVariableType]
        return tuple([map_tensors(fn, v) for v in members])
    return value


def all_tensors(value: Any) -> list[torch.Tensor]:
    """Every tensor in `value`, in order."""
    found: list[torch.Tensor] = []
    _collect((value,), found)
    return found


def _collect(values: Iterable[Any], found: list[torch.Tensor]) -> None:
    for value in values:
        kind: Any = type(value)  # pyright: ignore[reportUnknownVariableType]
        if kind in _LEAVES:
            continue
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif kind is dict:
            _collect(value.values(), found)
        elif issubclass(kind, (tuple, list)):
            _collect(value, found)
