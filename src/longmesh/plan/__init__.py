"""From any layout to any layout, the cheapest way: plans as values, made without communicating.

Clusters are read by commands that have to answer before torch is imported; what needs torch comes with its first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from longmesh.plan.cluster import Cluster, Level, Link
from longmesh.plan.named_clusters import cluster_of, named_cluster
from longmesh.plan.rate import Rate

if TYPE_CHECKING:
    from longmesh.plan.search import RedistributePlan, plan_redistribute
    from longmesh.plan.step import Step

__all__ = [
    "Cluster",
    "Level",
    "Link",
    "Rate",
    "RedistributePlan",
    "Step",
    "cluster_of",
    "named_cluster",
    "plan_redistribute",
]

_HOME_OF = {"RedistributePlan": "search", "Step": "step", "plan_redistribute": "search"}


def __getattr__(name: str) -> Any:
    """Import a public name that needs torch when it is first used."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    return value
