"""Op + input layouts -> output layouts: rules as data, one table."""

from longmesh.rules.rule import AxisRule, LocalView, Meta, OpCall, OutMeta, Program, Rule
from longmesh.rules.table import find_rule

__all__ = ["AxisRule", "LocalView", "Meta", "OpCall", "OutMeta", "Program", "Rule", "find_rule"]
