"""What a function of the user holds beside its arguments: tensors that need a gradient, and values it may change with.

Looked for in closures, globals that its code names, defaults, partials, bound objects and the functions those hold in
turn.
"""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Callable

import torch
from torch import Tensor

from longmesh._torch import write_count

_MOST_BYTES = 1 << 24
_PLAIN = (bool, int, float, complex, str)
_HOLDERS = (Tensor, torch.nn.Module, types.FunctionType, list, tuple, dict)


def captured_tensors(fn: Callable | None) -> list[Tensor]:
    """The tensors that `fn` captured and that need a gradient, in a fixed order without repetitions."""
    return [value for value in captured_values(fn) if isinstance(value, Tensor) and value.requires_grad]


def captured_state(fn: Callable) -> str:
    """A fingerprint of the numbers and tensors that `fn` captured: another one after they were changed in place.

    Without parameters, which a mask does not depend on and every step of training changes.
    """
    digest = hashlib.blake2b(digest_size=16)
    for value in captured_values(fn):
        if isinstance(value, Tensor):
            digest.update(b"" if isinstance(value, torch.nn.Parameter) else _content(value))
        else:
            digest.update(repr(value).encode())
    return digest.hexdigest()


def _content(tensor: Tensor) -> bytes:
    """What changes with a tensor's elements: they themselves, if they are few and plain to read."""
    if type(tensor) is not Tensor or tensor.nbytes > _MOST_BYTES:
        return repr((id(tensor), write_count(tensor))).encode()
    shape = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    if tensor.numel() == 0:  # its strides may be such that torch can't view it as bytes
        return shape
    return shape + tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def captured_values(fn: Callable | None) -> list[object]:
    """The tensors, numbers and texts that `fn` captured, in a fixed order, no object twice."""
    found: list[object] = []
    seen: set[int] = set()

    def walk(value: object) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, (Tensor, *_PLAIN)):
            found.append(value)
        elif isinstance(value, torch.nn.Module):
            for parameter in (*value.parameters(), *value.buffers()):
                walk(parameter)
        elif isinstance(value, functools.partial):
            for item in (value.func, *value.args, *value.keywords.values()):
                walk(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                walk(item)
        elif isinstance(value, dict):
            for item in value.values():
                walk(item)
        elif callable(value):
            _walk_function(value, walk)

    if fn is not None:
        walk(fn)
    return found


def _names_in(code: types.CodeType) -> list[str]:
    """The names that a function's code, and that of functions made in it, may look up as globals."""
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return [*code.co_names, *(name for c in inner for name in _names_in(c))]


def _walk_function(fn: Callable, walk: Callable[[object], None]) -> None:
    walk(getattr(fn, "__self__", None))
    inner = getattr(fn, "__func__", fn)
    for cell in getattr(inner, "__closure__", None) or ():
        walk(cell.cell_contents)
    for default in getattr(inner, "__defaults__", None) or ():
        walk(default)
    if isinstance(inner, types.FunctionType):
        for name in _names_in(inner.__code__):
            value = inner.__globals__.get(name)
            if isinstance(value, (*_HOLDERS, *_PLAIN)):
                walk(value)
    if not hasattr(inner, "__code__"):  # an object with __call__
        for value in getattr(fn, "__dict__", {}).values():
            walk(value)
