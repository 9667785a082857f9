"""Distributed tensors and exact long-context attention for PyTorch."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from longmesh.comm.machine import use_cluster
from longmesh.comm.stop import REQUEUE_EXIT_CODE, stop_requested
from longmesh.plan import Cluster, Level, Link, Rate, RedistributePlan, named_cluster, plan_redistribute
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
    flex_attention,
    full,
    get_rng_state,
    manual_seed,
    ones,
    rand,
    randn,
    set_rng_state,
    zeros,
)
from longmesh.tiles import tiled, tiled_cross_entropy, token_logprobs

__all__ = [
    "REQUEUE_EXIT_CODE",
    "Cluster",
    "DTensor",
    "DTensorSpec",
    "DeviceMesh",
    "Layout",
    "Level",
    "Link",
    "MaskPartial",
    "MeshShape",
    "Partial",
    "Placement",
    "Rate",
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
    "named_cluster",
    "ones",
    "plan_redistribute",
    "rand",
    "randn",
    "set_rng_state",
    "stop_requested",
    "tiled",
    "tiled_cross_entropy",
    "token_logprobs",
    "use_cluster",
    "zeros",
]
