"""Private names of torch live in `longmesh._torch`, and one that is gone costs one feature, not the package."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import longmesh
from longmesh._torch import process_wide
from longmesh._torch.lookup import missing_names

PACKAGE = Path(longmesh.__file__).parent
# Attributes of torch's ops, tensors, modules and autograd nodes; `torch._x` is seen by its first word.
ATTRIBUTES = {
    "_schema", "_op", "_overloadpacket", "_version", "_base", "_use_count", "_is_zerotensor", "_parameters", "_buffers",
    "_modules", "_sequence_nr", "_mesh_resources", "_plugins", "_dynamo_marked_constant",
}  # fmt: skip


def private_names(source: str) -> set[str]:
    """Names of torch with a part that begins with an underscore, by import or as a chain of attributes."""
    names: set[str] = set()
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    # Names for a part of torch (`aten = torch.ops.aten`), and what the file's own classes keep under such a name.
    short = {
        node.targets[0].id: ast.unparse(node.value)
        for node in nodes
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Attribute)
    }
    own = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) == "self"
    }
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            head, _, rest = ast.unparse(node).partition(".")
            names.add(f"{short.get(head, head)}.{rest}")
            if node.attr in ATTRIBUTES and not (head == "self" and node.attr in own):
                names.add("torch." + node.attr)
    return {
        name
        for name in names
        if name.split(".")[0] == "torch" and any(_is_private(part) for part in name.split(".")[1:])
    }


def _is_private(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__")


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from torch._ops import OpOverload", {"torch._ops.OpOverload"}),
        ("from torch.utils import _pytree", {"torch.utils._pytree"}),
        ("import torch\ntorch._C.f()", {"torch._C", "torch._C.f"}),
        ("op._schema.name", {"torch._schema"}),
        ("import torch\naten = torch.ops.aten\naten._softmax", {"torch.ops.aten._softmax"}),
        ("class A:\n    def f(self):\n        self._buffers = []\n        self._buffers.pop()", set()),
        ("class A(nn.Module):\n    def f(self):\n        self._buffers.pop()", {"torch._buffers"}),
        ("from torch import nn\nself._x.y", set()),
        ("import torch\ntorch.__version__", set()),
    ],
)
def test_the_check_sees_every_form(source: str, found: set[str]) -> None:
    assert private_names(source) == found


def test_private_names_are_in_one_module() -> None:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0]
        if room != "_torch" and (names := private_names(path.read_text())):
            found[str(path.relative_to(PACKAGE))] = sorted(names)
    assert found == {}


def test_this_torch_has_them_all() -> None:
    assert missing_names() == {}


WITHOUT = """
import importlib, sys
import torch, torch.distributed, torch._decomp, torch.utils._mode_utils, torch.distributed._functional_collectives

class Hide:
    # Names of torch that _find asks for, and are not to be found.
    hidden = {hidden!r}

real = importlib.import_module
def import_module(name, package=None):
    module = real(name, package)
    if not name.startswith("torch"):
        return module
    class Seen:
        def __getattr__(self, attribute):
            if name + ":" + attribute in Hide.hidden:
                raise AttributeError(attribute)
            return getattr(module, attribute)
    return Seen()
importlib.import_module = import_module
import longmesh.tensor, longmesh._torch as t
from longmesh._torch.lookup import missing_names
importlib.import_module = real
assert sorted(missing_names()) == sorted(Hide.hidden), missing_names()
{then}
"""


def run_without(*hidden: str, then: str) -> str:
    script = WITHOUT.format(hidden=list(hidden), then=then)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_missing_name_costs_its_feature_only() -> None:
    said = run_without(
        "torch._C:_current_autograd_node",
        "torch._C:_len_torch_dispatch_stack",
        "torch._decomp:decomposition_table",
        "torch.utils._python_dispatch:TorchDispatchMode",
        then="\n".join(
            (
                "from longmesh.debug.comm_mode import CommDebugMode",
                "assert t.dispatch_mode_count() == 1",
                "assert {t.aten._gone.default: 1, t.aten._too.default: 2}[t.aten._gone.default] == 1",
                "for feature in (t.running_node, CommDebugMode, t.aten._gone.default):",
                "    try: feature()",
                "    except longmesh.errors.LongmeshError as error: print(error)",
            )
        ),
    )
    lines = said.splitlines()
    assert len(lines) == 3
    assert (
        "has no torch._C._current_autograd_node, which longmesh needs for explaining backward passes"
        in lines[0]
    )
    assert (
        "has no torch.utils._python_dispatch.TorchDispatchMode, which longmesh needs for watching ops"
        in lines[1]
    )
    assert "has no torch.ops.aten._gone, which longmesh needs for rules and kernels of that op" in lines[2]
    assert all(line.endswith("use torch 2.13 or 2.14") for line in lines)


def test_hooks_on_modules_leave_nothing_behind() -> None:
    hooks = torch.nn.modules.module
    before = bool(hooks._has_any_global_hook())
    end = process_wide.watch_modules(lambda *args: None, lambda *args: None)
    assert hooks._has_any_global_hook() and not before
    end()
    assert not hooks._has_any_global_hook()
