"""From any layout to any layout, the cheapest way: plans as values, made without communicating."""

from longmesh.plan.cluster import Cluster, Level, Link
from longmesh.plan.named_clusters import cluster_of, named_cluster
from longmesh.plan.rate import Rate
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
