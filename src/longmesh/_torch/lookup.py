"""Looking a private name of torch up: once, with a clear error in its place where torch has it no more."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch

from longmesh.errors import LongmeshError

_NO_DEFAULT: Any = object()
_missing: dict[str, str] = {}  # what was looked up and is not there


def missing_names() -> dict[str, str]:
    """Private names of torch that this version of torch does not have, and what each is needed for."""
    return dict(_missing)


def find(where: str, feature: str, otherwise: Any = _NO_DEFAULT) -> Any:
    """The object at "module:attribute.attribute"; without it `otherwise`, or a function that raises."""
    module, _, path = where.partition(":")
    try:
        return reduce(getattr, path.split("."), importlib.import_module(module))
    except (ImportError, AttributeError):
        _missing[where] = feature
        return refusal(where, feature) if otherwise is _NO_DEFAULT else otherwise


def refusal(where: str, feature: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise LongmeshError(
            f"torch {torch.__version__} has no {where.replace(':', '.')}, which longmesh needs for {feature}; "
            "use torch 2.13 or 2.14"
        )

    return refuse


def find_class(where: str, feature: str) -> Any:
    """A class to derive from; without it one that can be derived from and not made."""
    found = find(where, feature, otherwise=None)
    if found is not None:
        return found
    return type(where.rpartition(":")[2], (), {"__new__": staticmethod(refusal(where, feature))})
