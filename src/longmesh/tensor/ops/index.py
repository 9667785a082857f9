"""Indexing along a sharded dim, and results whose shape depends on data."""

from __future__ import annotations

from torch._ops import OpOverload

from longmesh.tensor.dispatch import Handler

HANDLERS: dict[OpOverload, Handler] = {}
