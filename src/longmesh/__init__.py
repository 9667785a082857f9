"""Distributed tensors and exact long-context attention for PyTorch."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from longmesh.attention import flex_attention
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
from longmesh.tensor import (
    DTensor,
    capture,
    distribute_module,
    distribute_tensor,
    empty,
    full,
    get_rng_state,
    manual_seed,
    ones,
    rand,
    randn,
    set_rng_state,
    zeros,
)

__all__ = [
    "AxisCost",
    "CostModel",
    "DTensor",
    "DTensorSpec",
    "DeviceMesh",
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
    "capture",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "flex_attention",
    "full",
    "get_rng_state",
    "init_device_mesh",
    "manual_seed",
    "ones",
    "plan_redistribute",
    "rand",
    "randn",
    "set_rng_state",
    "zeros",
]
