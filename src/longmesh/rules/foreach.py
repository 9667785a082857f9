"""Lists of tensors: foreach ops and fused optimizer steps."""

from __future__ import annotations

from longmesh.rules.rule import Rule

RULES: dict[str, Rule] = {}
