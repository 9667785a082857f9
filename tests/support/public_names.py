"""The public names of the package, by the module they are imported from. The trainer is used by its command."""

import importlib
import inspect

from support.bridges import HAS_BRIDGES

MODULES = [
    "longmesh",
    "longmesh.attention",
    "longmesh.attention.masks",
    "longmesh.cache",
    "longmesh.checkpoint",
    "longmesh.debug",
    "longmesh.errors",
    "longmesh.experimental",
    "longmesh.experts",
    *(["longmesh.hf"] if HAS_BRIDGES else []),
    "longmesh.interop",
    "longmesh.parallel",
    "longmesh.placement_types",
    "longmesh.recurrent",
    "longmesh.testing",
    "longmesh.watch",
]
# Torch's own.
_TORCH = {"DeviceMesh", "init_device_mesh"}
# A number has no docstring: its module says what it means.
CONSTANTS = {"UNBOUNDED", "REQUEUE_EXIT_CODE"}


def public_names(module: str) -> list[str]:
    """What `module` offers of ours: its `__all__`, but for constants and what is torch's."""
    return [
        name
        for name in importlib.import_module(module).__all__
        if name not in _TORCH and name not in CONSTANTS
    ]


def own_docstring(name: str, value: object) -> str:
    """The docstring that was written for `value`: neither inherited nor made by a dataclass for itself."""
    if not (inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value)):
        return ""
    doc = value.__dict__.get("__doc__") if inspect.isclass(value) else value.__doc__
    return "" if doc is None or doc.startswith(f"{name}(") else doc.strip()


def docstring_of(module: str, name: str) -> str:
    return own_docstring(name, getattr(importlib.import_module(module), name))
