"""Distributed tensors and exact long-context attention for PyTorch."""

from longmesh.plan import AxisCost, CostModel, RedistributePlan, plan_redistribute
from longmesh.spec import (
    DTensorSpec,
    Layout,
    MaskPartial,
    MeshShape,
    Partial,
    Placement,
    Replicate,
    Shard,
    ShardOrderEntry,
    TensorMeta,
)
from longmesh.tensor import DTensor, distribute_module, distribute_tensor, empty, full, ones, zeros

__all__ = [
    "AxisCost",
    "CostModel",
    "DTensor",
    "DTensorSpec",
    "Layout",
    "MaskPartial",
    "MeshShape",
    "Partial",
    "Placement",
    "RedistributePlan",
    "Replicate",
    "Shard",
    "ShardOrderEntry",
    "TensorMeta",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "full",
    "ones",
    "plan_redistribute",
    "zeros",
]
