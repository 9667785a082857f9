"""Reductions over dims: sums, means, extrema, norms."""

from __future__ import annotations

from longmesh.rules.rule import Rule

RULES: dict[str, Rule] = {}
