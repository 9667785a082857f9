"""An op has one home: its rule is in one file of rules/, and nowhere else."""

from collections import Counter
from importlib import import_module
from pathlib import Path

import longmesh.rules
from longmesh.rules import table

HOMES = [
    p.stem for p in Path(longmesh.rules.__file__).parent.glob("*.py") if "\nRULES: dict" in p.read_text()
]


def test_every_op_is_listed_once():
    homes = {name: import_module(f"longmesh.rules.{name}").RULES for name in HOMES}
    counted = Counter(op for rules in homes.values() for op in rules)
    assert [op for op, count in counted.items() if count > 1] == []
    assert sum(map(len, homes.values())) == len(table.TABLE) > 600  # and every file is in the table


def test_a_rule_has_lines_or_a_program():
    lacking = [op for op, rule in table.TABLE.items() if rule.axis_rules is None and rule.program is None]
    assert lacking == []
