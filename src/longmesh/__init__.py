"""Distributed tensors and exact long-context attention for PyTorch.

A name is imported when it is first used. `import longmesh` alone takes milliseconds and does not import torch, so the
command line can answer at once. `_HOMES` says where a name comes from; the block for type checkers repeats it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    from longmesh.comm.machine import use_cluster
    from longmesh.comm.stop import REQUEUE_EXIT_CODE, stop_requested
    from longmesh.hf.plan_step import plan_step, search_step
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
        compute_local_shape_and_global_offset,
        distribute_module,
        distribute_tensor,
        empty,
        full,
        get_rng_state,
        manual_seed,
        ones,
        plan_op,
        rand,
        randn,
        set_rng_state,
        zeros,
    )
    from longmesh.tensor.flex import flex_attention
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
    "compute_local_shape_and_global_offset",
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
    "plan_op",
    "plan_redistribute",
    "plan_step",
    "rand",
    "randn",
    "search_step",
    "set_rng_state",
    "stop_requested",
    "tiled",
    "tiled_cross_entropy",
    "token_logprobs",
    "use_cluster",
    "zeros",
]

# The module that each name is imported from.
_HOMES = {
    "torch.distributed.device_mesh": "DeviceMesh init_device_mesh",
    "longmesh.comm.machine": "use_cluster",
    "longmesh.comm.stop": "REQUEUE_EXIT_CODE stop_requested",
    "longmesh.plan": "Cluster Level Link Rate RedistributePlan named_cluster plan_redistribute",
    "longmesh.spec": "DTensorSpec Layout MaskPartial MeshShape Partial Placement Replicate Shard ShardOrderEntry"
    " TensorMeta",
    "longmesh.tensor": "DTensor capture compute_local_shape_and_global_offset distribute_module distribute_tensor"
    " empty full get_rng_state manual_seed ones plan_op rand randn set_rng_state zeros",
    "longmesh.tensor.flex": "flex_attention",
    "longmesh.hf.plan_step": "plan_step search_step",
    "longmesh.tiles": "tiled tiled_cross_entropy token_logprobs",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
# Attributes that need no import of their own: `import longmesh; longmesh.parallel.ColwiseParallel`.
_MODULES = (
    *("attention", "cache", "checkpoint", "comm", "debug", "errors", "experimental", "interop", "parallel"),
    *("placement_types", "plan", "recurrent", "rules", "spec", "tensor", "testing", "tiles", "watch"),
)


def __getattr__(name: str) -> Any:
    """Import a public name or subpackage when it is first used."""
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
