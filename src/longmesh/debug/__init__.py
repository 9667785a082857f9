"""Seeing what distributed tensors do: every byte that moves and why, and who holds what.

Watching a run, which was here, is `longmesh.watch`.
"""

import warnings
from importlib import import_module
from typing import Any

from longmesh.debug.comm_mode import CommDebugMode
from longmesh.debug.explain import explain
from longmesh.debug.explanation import Explanation
from longmesh.debug.strict import strict
from longmesh.debug.visualize import visualize_sharding

__all__ = ["CommDebugMode", "Explanation", "explain", "strict", "visualize_sharding"]

_MOVED = ("Watch", "desync_check", "watch")


def __getattr__(name: str) -> Any:
    """Names that have moved to `longmesh.watch`, for one more release."""
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    words = f"longmesh.debug.{name} is now longmesh.watch.{name}; the old name goes in the next release"
    warnings.warn(words, DeprecationWarning, stacklevel=2)
    return getattr(import_module("longmesh.watch"), name)
