"""Views: the same elements under another shape."""

from __future__ import annotations

from longmesh.rules.rule import Rule

RULES: dict[str, Rule] = {}
