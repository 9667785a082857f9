"""Views that no layout can follow."""

from __future__ import annotations

from torch._ops import OpOverload

from longmesh.tensor.dispatch import Handler

HANDLERS: dict[OpOverload, Handler] = {}
