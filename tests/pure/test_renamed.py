"""Names that were public keep working for a release, and warn."""

import importlib

import pytest

OLD = [
    ("longmesh.attention", "Layout", "TokenLayout"),
    ("longmesh.attention.layout.base", "Layout", "TokenLayout"),
]


@pytest.mark.parametrize(("module", "old", "new"), OLD)
def test_an_old_name_is_the_new_one_and_warns(module, old, new):
    home = importlib.import_module(module)
    with pytest.warns(DeprecationWarning, match=f"{module}.{old} is now {module}.{new}; the old name goes"):
        assert getattr(home, old) is getattr(home, new)
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        home.Nothing  # noqa: B018
