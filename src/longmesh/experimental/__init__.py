"""Escape hatches: plain functions on DTensors, rules of your own, plain tensors among DTensors."""

from longmesh.experimental.local_map import local_map
from longmesh.experimental.register_sharding import register_sharding
from longmesh.experimental.replication import implicit_replication

__all__ = ["implicit_replication", "local_map", "register_sharding"]
