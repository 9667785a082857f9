"""What kernels of mixers share: the recurrence of the current state, and how a forward comes to call ours."""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping
from typing import Any, NoReturn

from torch import nn

from longmesh.errors import LongmeshError
from longmesh.hf.state import current
from longmesh.recurrent import RecurrentParallel


def current_recurrence(*, through_padding: bool = False) -> RecurrentParallel:
    """Recurrent layers over the tokens that a model sees. While it is inspected, each token is a document of its own.

    `through_padding`: of a layer that knows no padding, whose state runs through that on the left into the tokens.
    """
    return current().recurrence(through_padding=through_padding)


def refuse_cache() -> NoReturn:
    """Raise for a state that a cache would hold."""
    raise LongmeshError(
        "a recurrent layer was asked for a state of its cache inside hf.context_parallel, which trains on whole "
        "sequences; call the model with use_cache=False"
    )


def with_globals(module: nn.Module, ours: Mapping[str, Any]) -> types.FunctionType:
    """A copy of the forward of the module's class with our functions among its globals."""
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
