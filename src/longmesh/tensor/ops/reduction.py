"""Reductions that need more than one local call."""

from __future__ import annotations

from torch._ops import OpOverload

from longmesh.tensor.dispatch import Handler

HANDLERS: dict[OpOverload, Handler] = {}
