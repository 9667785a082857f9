"""Names that have moved work under their old names, and say where they are."""

import pytest

import longmesh.cache
import longmesh.debug
import longmesh.watch


@pytest.mark.parametrize("name", ["Watch", "desync_check", "watch"])
def test_watching_is_a_room_of_its_own(name):
    words = f"longmesh.debug.{name} is now longmesh.watch.{name}; the old name goes in the next release"
    with pytest.warns(DeprecationWarning, match=words):
        assert getattr(longmesh.debug, name) is getattr(longmesh.watch, name)


@pytest.mark.parametrize(("old", "new"), [("Placement", "PagePlacement"), ("Step", "PoolStep")])
def test_a_caches_names_are_its_own(old, new):
    with pytest.warns(DeprecationWarning, match=rf"longmesh\.cache\.{old} is now {new}; the old name goes"):
        assert getattr(longmesh.cache, old) is getattr(longmesh.cache, new)


def test_other_names_are_missing_as_ever():
    with pytest.raises(AttributeError, match=r"module 'longmesh\.debug' has no attribute 'nothing'"):
        longmesh.debug.nothing  # noqa: B018
