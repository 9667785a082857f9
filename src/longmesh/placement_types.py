"""Placements under the name of torch's module: `from longmesh.placement_types import Shard`."""

from longmesh.spec.placement import MaskPartial, Partial, Placement, Replicate, Shard

__all__ = ["MaskPartial", "Partial", "Placement", "Replicate", "Shard"]
