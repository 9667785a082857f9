"""Public names that have a new name: the old one works for one release, and warns."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping


def renamed(module: str, names: Mapping[str, str]) -> Callable[[str], object]:
    """The `__getattr__` of a module whose names were renamed: {old: new}."""

    def find(name: str) -> object:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        new = names[name]
        warnings.warn(
            f"{module}.{name} is now {module}.{new}; the old name goes in the next release",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(importlib.import_module(module), new)

    return find
