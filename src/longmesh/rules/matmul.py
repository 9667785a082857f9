"""Matrix products: mm, addmm, bmm, baddbmm, dot, mv and their kin."""

from __future__ import annotations

from longmesh.rules.rule import Rule

RULES: dict[str, Rule] = {}
