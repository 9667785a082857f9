"""From any layout to any layout, the cheapest way: plans as values, made without communicating."""

from longmesh.plan.cost import AxisCost, CostModel
from longmesh.plan.search import RedistributePlan, plan_redistribute
from longmesh.plan.step import Step

__all__ = ["AxisCost", "CostModel", "RedistributePlan", "Step", "plan_redistribute"]
