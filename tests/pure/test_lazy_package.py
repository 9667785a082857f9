"""`import longmesh` is cheap: torch, and what longmesh registers in it, come with the first name that needs them."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import longmesh

SOURCE = Path(longmesh.__file__)


def run(program: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_does_not_import_torch():
    assert run("import sys, longmesh; print(longmesh.__version__, 'torch' in sys.modules)") == (
        f"{longmesh.__version__} False"
    )


def test_type_checkers_see_what_is_imported_at_run_time():
    block = next(node for node in ast.parse(SOURCE.read_text()).body if isinstance(node, ast.If))
    seen = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == longmesh._HOME_OF
    assert sorted(seen) == sorted(longmesh.__all__)


def test_names_are_listed_before_they_are_used():
    listed = run("import longmesh; print(*dir(longmesh))").split()
    assert {*longmesh.__all__, *longmesh._MODULES, "__version__"} <= set(listed)


def test_every_name_is_there_and_is_looked_up_once():
    for name in longmesh.__all__:
        assert getattr(longmesh, name) is vars(longmesh)[name]
    for name in longmesh._MODULES:
        assert getattr(longmesh, name).__name__ == f"longmesh.{name}"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'longmesh' has no attribute 'Shards'"):
        _ = longmesh.Shards
    with pytest.raises(ImportError, match="cannot import name 'Shards' from 'longmesh'"):
        exec("from longmesh import Shards")


def test_a_star_import_brings_every_name():
    names: dict[str, object] = {}
    exec("from longmesh import *", names)
    assert set(longmesh.__all__) <= set(names)


def test_what_importing_registers_comes_with_the_first_tensor():
    program = """
import torch, longmesh
from torch.nn.modules import module
from torch.optim.optimizer import _foreach_supported_types as listed
def registered():
    safe = {getattr(t, '__name__', '') for t in torch.serialization.get_safe_globals()}
    ops = hasattr(torch.ops.longmesh, 'all_reduce')
    return len(listed) > 2, bool(module._global_parameter_registration_hooks), 'DTensor' in safe, ops
before = registered()
from longmesh import distribute_tensor
print(before, registered())
"""
    assert run(program) == "(False, False, False, False) (True, True, True, True)"


def test_tensors_come_without_the_attention_engine():
    program = """
import sys
from longmesh import DTensor, distribute_tensor
print([name for name in ('attention', 'parallel', 'tiles', 'debug') if f'longmesh.{name}' in sys.modules])
"""
    assert run(program) == "[]"
