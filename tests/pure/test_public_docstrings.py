"""Every public name has a docstring of its own, and in it an example; tests/ranks/test_public_examples.py runs them."""

import dataclasses
import functools
import importlib
import inspect

import pytest

from support.public_names import CONSTANTS, MODULES, docstring_of, own_docstring, public_names


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_a_docstring(module):
    public = importlib.import_module(module)
    assert (public.__doc__ or "").strip()
    assert [name for name in public_names(module) if not docstring_of(module, name)] == []


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_an_example_after_its_contract(module):
    docstrings = {name: docstring_of(module, name) for name in public_names(module)}
    assert [name for name, doc in docstrings.items() if ">>> " not in doc or doc.startswith(">>>")] == []


def bare_members(kind: type) -> list[str]:
    """The public methods and properties that a class adds and nobody, it or a parent, says anything about."""
    own = [name for name, value in vars(kind).items() if not name.startswith("_") and is_member(value)]
    return [name for name in own if not any(vars(k)[name].__doc__ for k in kind.__mro__ if name in vars(k))]


def is_member(value: object) -> bool:
    return inspect.isroutine(value) or isinstance(value, property | functools.cached_property)


@pytest.mark.parametrize("module", MODULES)
def test_every_public_method_and_property_has_a_docstring(module):
    public = importlib.import_module(module)
    kinds = {
        name: getattr(public, name) for name in public_names(module) if inspect.isclass(getattr(public, name))
    }
    assert {name: bare for name, kind in kinds.items() if (bare := bare_members(kind))} == {}


def test_a_method_without_a_word_is_found():
    class Parent:
        def told(self):
            """Said."""

    class Child(Parent):
        size = 3

        def told(self): ...

        def bare(self): ...

        @property
        def silent(self): ...

    assert bare_members(Child) == ["bare", "silent"]


def test_the_count():
    counts = {module: len(public_names(module)) for module in MODULES}
    assert all(counts.values()) and sum(counts.values()) >= 110, counts


def test_constants_are_numbers():
    homes = [importlib.import_module(name) for name in ("longmesh", "longmesh.attention")]
    found = {name: getattr(home, name) for home in homes for name in CONSTANTS if hasattr(home, name)}
    assert found.keys() == CONSTANTS and all(isinstance(value, int) for value in found.values())


def test_what_a_dataclass_or_a_parent_says_does_not_count():
    class Parent:
        """Said."""

    class Child(Parent):
        pass

    @dataclasses.dataclass
    class Value:
        x: int

    assert [own_docstring(c.__name__, c) for c in (Parent, Child, Value)] == ["Said.", "", ""]
