"""What a plan depends on, as a key: how each tensor is held, and the values of the other arguments.

add.Tensor(x, y)        (held of x, held of y)
sum.dim_IntList(x, [1]) (held of x, list, 1, 1)
mul.Tensor(x, 2.5)      (held of x, float), as for any float: the plan of a pointwise op does not look at it
"""

from __future__ import annotations

from typing import Any

import torch

from longmesh.tensor.dtensor import DTensor

# Stands in a key for a plain tensor that is no scalar.
PLAIN = object()
# Of these the value says all: no two of them that differ are equal.
_VALUES = frozenset((int, str, type(None), torch.dtype, torch.layout, torch.memory_format, torch.device))


def describe(value: Any, parts: list[Any], reads_floats: bool = True) -> Any:
    """Append to `parts` what a plan depends on: how a tensor is held, the value of anything else. Returns the value
    with each DTensor's local part in its place."""
    kind = type(value)
    if kind in _VALUES:
        parts.append(value)
        return value
    if isinstance(value, DTensor):
        parts.append(value._tensor_layout)
        return value._local_tensor
    if kind is list or kind is tuple:
        parts.append(list)
        parts.append(len(value))
        head = value[0] if value else None
        first = type(head)
        if first is int:  # sizes, dims: all of them integers, or symbols that don't hash
            parts += value
            return value
        if first is bool:
            parts.append(bool)
            parts += value
            return value
        if first is float and set(map(type, value)) == {float}:  # one number for each tensor of a list
            parts.append(float)
            if reads_floats:
                parts += value
            return value
        if isinstance(head, DTensor):
            try:
                parts += [v._tensor_layout for v in value]
                return [v._local_tensor for v in value]
            except AttributeError:  # a plain tensor among them
                pass
        return [describe(v, parts, reads_floats) for v in value]
    if kind is float:
        parts.append(float)
        if reads_floats:
            parts.append(value)
    elif kind is bool or kind is complex:
        parts.append(kind)
        parts.append(value)
    elif kind is slice:
        parts.append(slice)
        describe([value.start, value.stop, value.step], parts)
    elif isinstance(value, torch.Tensor):
        # A number that torch has wrapped, as in x * 2.0: the plan is the same for any.
        parts += (value.dtype,) if value.ndim == 0 else (PLAIN, value.dtype, value.shape)
    else:
        parts.append(value)
    return value


def describe_named(kwargs: dict[str, Any], parts: list[Any], reads_floats: bool = True) -> dict[str, Any]:
    parts.append(tuple(kwargs))
    return {name: describe(value, parts, reads_floats) for name, value in kwargs.items()}


def exact_key(args: tuple[Any, ...], kwargs: dict[str, Any], reads_floats: bool = True) -> tuple[Any, ...]:
    parts: list[Any] = []
    for value in args:
        describe(value, parts, reads_floats)
    if kwargs:
        describe_named(kwargs, parts, reads_floats)
    return tuple(parts)
