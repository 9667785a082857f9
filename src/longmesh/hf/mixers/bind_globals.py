"""A copy of a forward with other globals: in transformers a mixer's kernels are globals of its forward."""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping
from typing import Any

from torch import nn


def with_globals(module: nn.Module, ours: Mapping[str, Any]) -> types.FunctionType:
    """The forward of the module's class with our functions among its globals."""
    forward = inspect.unwrap(type(module).forward)
    assert isinstance(forward, types.FunctionType), f"{type(module).__name__}.forward is no Python function"
    copy = types.FunctionType(
        forward.__code__,
        {**forward.__globals__, **ours},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy
