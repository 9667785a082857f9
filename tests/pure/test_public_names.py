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


MODULES = ["", ".placement_types", ".parallel", ".debug", ".experimental"]
CLASSES = ["Placement", "Shard", "Replicate", "Partial", "DTensor"]


def public(value):
    return [name for name in dir(value) if not name.startswith("_")]


@pytest.mark.parametrize("module", MODULES)
def test_every_name_of_the_installed_torch_is_here(module):
    ours = importlib.import_module(f"longmesh{module}")
    theirs = importlib.import_module(f"torch.distributed.tensor{module}")
    assert theirs.__all__
    assert [name for name in theirs.__all__ if not hasattr(ours, name)] == []


@pytest.mark.parametrize("name", CLASSES)
def test_every_method_and_attribute_of_the_installed_torch_is_here(name):
    ours, theirs = getattr(longmesh, name), getattr(reference, name)
    assert len(public(theirs)) >= 3
    assert [method for method in public(theirs) if not hasattr(ours, method)] == []
    for method in vars(theirs):
        if not method.startswith("_") and inspect.isfunction(getattr(theirs, method)):  # C++ has no signature
            assert_same_arguments(f"{name}.{method}", getattr(ours, method), getattr(theirs, method))


@pytest.mark.parametrize("size", [0, 1, 5, 7, 8])
def test_shards_have_torchs_sizes(size):
    for num_chunks in (1, 2, 4, 7):
        for rank in range(num_chunks):
            given = (size, num_chunks, rank)
            expected = reference.Shard.local_shard_size_and_offset(*given)
            assert longmesh.Shard.local_shard_size_and_offset(*given) == expected
    assert sorted(longmesh.Partial.ALL_REDUCE_OPS) == sorted(reference.Partial.ALL_REDUCE_OPS)
    assert longmesh.Partial.LINEAR_REDUCE_OPS == reference.Partial.LINEAR_REDUCE_OPS


def look_up(root, name):
    found = importlib.import_module(root)
    for part in name.split("."):
        if not hasattr(found, part):
            importlib.import_module(f"{root}.{part}")
        found = getattr(found, part)
    return found


def test_the_mesh_is_torchs():
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
