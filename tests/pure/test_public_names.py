"""A program moves over from torch.distributed.tensor by changing its import: same names, arguments, defaults."""

import importlib
import inspect

import pytest
import torch.distributed.tensor as reference

import longmesh
import longmesh.experimental
import longmesh.parallel

FUNCTIONS = ["distribute_tensor", "distribute_module", "ones", "empty", "full", "rand", "randn", "zeros"]
METHODS = ["from_local", "to_local", "redistribute", "full_tensor"]
# What torch has in a submodule, ours has in the submodule of the same name.
SUBMODULES = {
    "parallel": importlib.import_module("torch.distributed.tensor.parallel").__all__,
    "experimental": ["context_parallel", "implicit_replication", "local_map", "register_sharding"],
}


def look_up(root, name):
    found = importlib.import_module(root)
    for part in name.split("."):
        if not hasattr(found, part):
            importlib.import_module(f"{root}.{part}")
        found = getattr(found, part)
    return found


def test_every_public_name_is_here():
    missing = [name for name in reference.__all__ if not hasattr(longmesh, name)]
    assert missing == []
    assert longmesh.DeviceMesh is reference.DeviceMesh
    assert longmesh.init_device_mesh is reference.init_device_mesh


@pytest.mark.parametrize(
    "name",
    [
        *FUNCTIONS,
        *(f"DTensor.{method}" for method in METHODS),
        *(f"{module}.{name}" for module, names in SUBMODULES.items() for name in names),
    ],
)
def test_arguments_and_defaults_are_the_same(name):
    ours, theirs = look_up("longmesh", name), look_up("torch.distributed.tensor", name)
    assert_same_arguments(name, ours, theirs)


@pytest.mark.parametrize("name", ["context_parallel_unshard", "set_rotate_method"])
def test_what_torch_has_beside_its_context_parallel(name):
    theirs = importlib.import_module("torch.distributed.tensor.experimental._attention")
    assert_same_arguments(name, getattr(longmesh.experimental, name), getattr(theirs, name))


def assert_same_arguments(name, ours, theirs):
    mine = inspect.signature(ours).parameters
    for parameter in inspect.signature(theirs).parameters.values():
        assert parameter.name in mine, f"{name} lacks {parameter.name}"
        own = mine[parameter.name]
        assert (own.default, own.kind) == (parameter.default, parameter.kind), f"{name}({parameter.name})"


@pytest.mark.parametrize(
    "module", [longmesh, longmesh.parallel, longmesh.experimental], ids=lambda m: m.__name__
)
def test_every_public_name_has_a_docstring(module):
    bare = [name for name in module.__all__ if not inspect.getdoc(getattr(module, name))]
    assert bare == []
