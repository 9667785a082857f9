"""Rules that users register: they come before the table's."""

from __future__ import annotations

from longmesh.rules.rule import Rule


class RuleRegistry:
    """Rules by op name, as in the table."""

    def __init__(self) -> None:
        self._rules: dict[str, Rule] = {}

    def add(self, name: str, rule: Rule) -> None:
        self._rules[name] = rule

    def remove(self, name: str) -> None:
        self._rules.pop(name, None)

    def get(self, name: str) -> Rule | None:
        return self._rules.get(name)


registered = RuleRegistry()
