"""A KV cache that no single rank holds: pages of keys and values over the ranks of a mesh, and exact attention there.

Placement and bookkeeping are arithmetic that every rank repeats; only attention communicates, one collective per
layer when decoding.
"""

from longmesh.cache.placement import Placement
from longmesh.cache.pool import PagePool
from longmesh.cache.sequence import Sequence
from longmesh.cache.step import Step

__all__ = ["PagePool", "Placement", "Sequence", "Step"]
