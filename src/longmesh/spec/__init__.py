"""Layouts as values: no process group, no device."""

from longmesh.spec.chunking import chunk_interval, nested_interval
from longmesh.spec.layout import Layout
from longmesh.spec.mesh import Coordinate, MeshShape
from longmesh.spec.placement import REDUCE_OPS, MaskPartial, Partial, Placement, Replicate, Shard
from longmesh.spec.shard_order import ShardOrder, ShardOrderEntry
from longmesh.spec.tensor_spec import DTensorSpec, TensorMeta

__all__ = [
    "REDUCE_OPS",
    "Coordinate",
    "DTensorSpec",
    "Layout",
    "MaskPartial",
    "MeshShape",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "ShardOrder",
    "ShardOrderEntry",
    "TensorMeta",
    "chunk_interval",
    "nested_interval",
]
