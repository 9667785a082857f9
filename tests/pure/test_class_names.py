"""A class name means one thing in the whole package, private names too."""

import ast
from collections import defaultdict
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "src" / "longmesh"
# To be renamed: a name leaves this list with its second meaning, and none is added.
AMBIGUOUS = {
    "AttentionCall",
    "Call",
    "Exchange",
    "Gather",
    "Link",
    "Model",
    "Part",
    "Place",
    "Redistribute",
    "Route",
    "Saved",
    "StandIn",
    "Step",
    "Transfer",
}


def meanings() -> dict[str, list[str]]:
    """Where each class name is defined; a leading underscore makes no other name."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name.lstrip("_")].append(f"{path.relative_to(SOURCES)}:{node.lineno}")
    return found


def test_a_class_name_means_one_thing():
    several = {name: places for name, places in meanings().items() if len(places) > 1}
    assert {name: places for name, places in several.items() if name not in AMBIGUOUS} == {}
