"""Every public name has a docstring of its own, neither inherited nor written by a dataclass for itself."""

import importlib
import inspect

import pytest

MODULES = [
    "longmesh",
    "longmesh.attention",
    "longmesh.attention.masks",
    "longmesh.checkpoint",
    "longmesh.debug",
    "longmesh.experimental",
    "longmesh.parallel",
    "longmesh.testing",
]
# A number has no docstring: the module of blocks says what it means.
CONSTANTS = {"UNBOUNDED"}


def own_docstring(name: str, value: object) -> str:
    """The docstring that was written for `value`."""
    if not (inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value)):
        return ""
    doc = value.__dict__.get("__doc__") if inspect.isclass(value) else value.__doc__
    return "" if doc is None or doc.startswith(f"{name}(") else doc.strip()


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_a_docstring(module):
    public = importlib.import_module(module)
    assert (public.__doc__ or "").strip()
    bare = [name for name in public.__all__ if not own_docstring(name, getattr(public, name))]
    assert set(bare) <= CONSTANTS


def test_what_a_dataclass_or_a_parent_says_does_not_count():
    import dataclasses

    class Parent:
        """Said."""

    class Child(Parent):
        pass

    @dataclasses.dataclass
    class Value:
        x: int

    assert [own_docstring(c.__name__, c) for c in (Parent, Child, Value)] == ["Said.", "", ""]
