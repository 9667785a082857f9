"""Import rules that import-linter cannot see: a subpackage of an external package is all of it there.

The package implements what `torch.distributed.tensor` does, so only the bridge may import it.
"""

import ast
from pathlib import Path

import pytest

import longmesh

PACKAGE = Path(longmesh.__file__).parent
FORBIDDEN = "torch.distributed.tensor"
BRIDGES = {"interop"}


def imported_names(source: str) -> set[str]:
    """Every dotted name that an import statement or a chain of attributes mentions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))
    return names


def is_forbidden(name: str) -> bool:
    return name == FORBIDDEN or name.startswith(FORBIDDEN + ".")


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed.tensor",
        "from torch.distributed import tensor",
        "from torch.distributed.tensor.placement_types import Shard",
        "def f():\n    import torch.distributed.tensor.debug as d",
        "import torch\nx = torch.distributed.tensor.DTensor",
    ],
)
def test_the_check_sees_every_form(source: str) -> None:
    assert any(is_forbidden(name) for name in imported_names(source))


@pytest.mark.parametrize(
    "source", ["import torch.distributed.tensor_parallel", "from .tensor import DTensor"]
)
def test_the_check_lets_others_pass(source: str) -> None:
    assert not any(is_forbidden(name) for name in imported_names(source))


def test_only_the_bridge_imports_the_reference() -> None:
    files = [
        path
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0].split(".")[0] not in BRIDGES
    ]
    assert len(files) > 10
    offenders = {
        str(path.relative_to(PACKAGE)): sorted(filter(is_forbidden, imported_names(path.read_text())))
        for path in files
        if any(map(is_forbidden, imported_names(path.read_text())))
    }
    assert offenders == {}
