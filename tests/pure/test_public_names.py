"""A program moves over from torch.distributed.tensor by changing its import: same names, arguments, defaults."""

import inspect

import pytest
import torch.distributed.tensor as reference

import longmesh

FUNCTIONS = ["distribute_tensor", "distribute_module", "ones", "empty", "full", "rand", "randn", "zeros"]
METHODS = ["from_local", "to_local", "redistribute", "full_tensor"]


def test_every_public_name_is_here():
    missing = [name for name in reference.__all__ if not hasattr(longmesh, name)]
    assert missing == []
    assert longmesh.DeviceMesh is reference.DeviceMesh
    assert longmesh.init_device_mesh is reference.init_device_mesh


@pytest.mark.parametrize("name", [*FUNCTIONS, *(f"DTensor.{method}" for method in METHODS)])
def test_arguments_and_defaults_are_the_same(name):
    ours, theirs = longmesh, reference
    for part in name.split("."):
        ours, theirs = getattr(ours, part), getattr(theirs, part)
    mine = inspect.signature(ours).parameters
    for parameter in inspect.signature(theirs).parameters.values():
        assert parameter.name in mine, f"{name} lacks {parameter.name}"
        own = mine[parameter.name]
        assert (own.default, own.kind) == (parameter.default, parameter.kind), f"{name}({parameter.name})"


@pytest.mark.parametrize("name", longmesh.__all__)
def test_every_public_name_has_a_docstring(name):
    assert inspect.getdoc(getattr(longmesh, name))
