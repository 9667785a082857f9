"""A KV cache that no single rank holds: pages of keys and values over the ranks of a mesh, and exact attention there.

Placement and bookkeeping are arithmetic that every rank repeats; only attention communicates, one collective per
layer when decoding.
"""

import warnings
from typing import Any

from longmesh.cache.placement import PagePlacement
from longmesh.cache.pool import PagePool
from longmesh.cache.sequence import Sequence
from longmesh.cache.step import PoolStep

__all__ = ["PagePlacement", "PagePool", "PoolStep", "Sequence"]

_RENAMED = {"Placement": PagePlacement, "Step": PoolStep}


def __getattr__(name: str) -> Any:
    """Old names, for one more release."""
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    words = f"longmesh.cache.{name} is now {_RENAMED[name].__name__}; the old name goes in the next release"
    warnings.warn(words, DeprecationWarning, stacklevel=2)
    return _RENAMED[name]
