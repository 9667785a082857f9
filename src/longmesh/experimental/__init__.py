"""Escape hatches: plain functions on DTensors, rules of your own, plain tensors among DTensors; and the scope of
context parallelism."""

from longmesh.attention import create_cp_block_mask
from longmesh.experimental.context_parallel import (
    context_parallel,
    context_parallel_shard,
    context_parallel_unshard,
    disable_context_parallel,
    enable_context_parallel,
    set_rotate_method,
)
from longmesh.experimental.local_map import local_map
from longmesh.experimental.register_sharding import register_sharding
from longmesh.tensor.plain import implicit_replication

__all__ = [
    "context_parallel",
    "context_parallel_shard",
    "context_parallel_unshard",
    "create_cp_block_mask",
    "disable_context_parallel",
    "enable_context_parallel",
    "implicit_replication",
    "local_map",
    "register_sharding",
    "set_rotate_method",
]
