"""Seeing what distributed tensors do: every byte that moves and why, who holds what, where ranks diverge."""

from longmesh.debug.comm_mode import CommDebugMode
from longmesh.debug.desync import desync_check
from longmesh.debug.explain import explain
from longmesh.debug.explanation import Explanation
from longmesh.debug.strict import strict
from longmesh.debug.visualize import visualize_sharding
from longmesh.debug.watch import Watch, watch

__all__ = [
    "CommDebugMode",
    "Explanation",
    "Watch",
    "desync_check",
    "explain",
    "strict",
    "visualize_sharding",
    "watch",
]
