"""Indexing: slices, selections, gathers, scatters, joins."""

from __future__ import annotations

from longmesh.rules.rule import Rule

RULES: dict[str, Rule] = {}
