"""How a function call travels to a rank.

The call is pickled, so a function goes as "module, name". A rank was forked before most modules were
imported, test modules among them, and those may not be importable by name at all; so the files of the
modules that a call mentions go along, and so do the import path and the warning filters.

Pitfall: a module is imported once per rank; a rank never sees a later change of the caller's globals.

Pickle with a short way for plain tensors.

torch's own pickling of a tensor takes 400 µs, most of a small run's time. A dense, contiguous CPU tensor
is its bytes, dtype and shape; everything else (views with strides, Parameters, subclasses) goes torch's way.

Pitfall: two tensors that share memory arrive as two copies.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import pickle
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Literal

import torch

from longmesh.errors import LongmeshError


class CopyPickler(pickle.Pickler):
    """Pickles in memory, without shared-memory descriptors."""

    def __init__(self) -> None:
        self._buffer = io.BytesIO()
        super().__init__(self._buffer, protocol=pickle.HIGHEST_PROTOCOL)

    def to_bytes(self, value: Any) -> bytes:
        self.dump(value)
        return self._buffer.getvalue()

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and _is_plain(obj):
            data = obj.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
            return _rebuild, (data, obj.dtype, tuple(obj.shape), obj.requires_grad)
        return NotImplemented


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.__dict__
    )


def _rebuild(data: bytes, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(shape).requires_grad_(requires_grad)


def name_function(fn: Callable[..., Any]) -> str:
    module = getattr(fn, "__module__", None)
    name = getattr(fn, "__qualname__", None) or repr(fn)
    return f"{module}.{name}" if module else name


class _CallPickler(CopyPickler):
    """Notes the modules of all functions and classes it meets."""

    def __init__(self) -> None:
        super().__init__()
        self.module_names: dict[str, None] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, FunctionType | type):
            self.module_names[obj.__module__] = None
            return NotImplemented
        return super().reducer_override(obj)


def pack_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """The call as bytes; a function or argument that can't be sent is an error here, not on a rank."""
    qualname = getattr(fn, "__qualname__", "")
    if "<locals>" in qualname or "<lambda>" in qualname:
        raise LongmeshError(
            f"cannot send {name_function(fn)} to the ranks: "
            "a lambda or nested function has no importable name; "
            "define it at the top level of a module and pass what it needs as arguments"
        )
    pickler = _CallPickler()
    try:
        call = pickler.to_bytes((fn, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise LongmeshError(
            f"cannot send {name_function(fn)} and its arguments to the ranks: {error}; "
            "pass values that pickle can copy, and make the rest inside the function"
        ) from error
    files = [(name, getattr(sys.modules.get(name), "__file__", None)) for name in pickler.module_names]
    return pickle.dumps((files, call))


def unpack_call(data: bytes) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The call again, on a rank: import what it mentions, then unpickle it."""
    files, call = pickle.loads(data)
    for name, file in files:
        if name not in sys.modules:
            import_from(name, file)
    return pickle.loads(call)


def import_from(name: str, file: str | None) -> ModuleType:
    """Import `name` if that finds `file`, else import `file` as `name`.

    Asks the finders of `sys.meta_path`, so that pytest rewrites the asserts of a test module here too.
    """
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if file is None or (spec is not None and spec.origin == file):
        return importlib.import_module(name)
    specs = (finder.find_spec(name, [str(Path(file).parent)]) for finder in sys.meta_path)
    found = next((s for s in specs if s is not None and s.origin == file), None)
    spec = found or importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, f"no loader for {file}"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


WarningAction = Literal["default", "error", "ignore", "always", "module", "once"]
Surroundings = tuple[list[str], list[tuple[WarningAction, str, type[Warning], str, int]]]


def read_surroundings() -> Surroundings:
    """The import path and warning filters of this process: plain values that compare and pickle."""

    def pattern(part: Any) -> str:
        if part is None:
            return ""
        return part.pattern if isinstance(part, re.Pattern) else re.escape(part)

    current: list[Any] = list(warnings.filters)
    return list(sys.path), [(a, pattern(msg), kind, pattern(mod), n) for a, msg, kind, mod, n in current]


def apply_surroundings(surroundings: Surroundings) -> None:
    path, filters = surroundings
    sys.path[:] = path
    warnings.resetwarnings()
    for action, message, category, module, lineno in filters:
        warnings.filterwarnings(action, message, category, module, lineno, append=True)
