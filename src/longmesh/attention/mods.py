"""Functions of one pair that users give, FlexAttention's score_mod and mask_mod: what they hold, how they are asked.

What a function holds beside its arguments (tensors that need a gradient, values it may change with) is looked for in
closures, globals that its code names, defaults, partials, bound objects and the functions those hold in turn.

Functions see scalars, so to ask for every pair of a tile at once they are vmapped over batch, head, row and key exactly
as FlexAttention does (a broadcast would silently change what ``(a[q_idx] * b[kv_idx]).sum()`` means). The pitfall:
under vmap ``table[h]`` asks an index tensor for a Python number, which a batched scalar cannot give, so
`_ScalarIndexing` turns it into a gather.

Shapes: B batch, H query heads, L and M rows and keys of a tile.
"""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

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


Mod = TypeVar("Mod", bound=Callable[..., Any] | None)


class _ScalarIndexing(TorchFunctionMode):
    """`tensor[i, j]` with tensor indices becomes aten.index, which vmap knows how to batch."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if all(isinstance(i, Tensor) and i.dtype != torch.bool for i in index):
                return torch.ops.aten.index(args[0], list(index))
        return func(*args, **(kwargs or {}))


def apply_score_mod(score_mod: Callable, score_BHLM: Tensor, at: tuple[Tensor, ...]) -> Tensor:
    """score_mod on every pair; differentiable in the score and in what the function captured."""
    fn = score_mod
    for dims in (
        (0, None, None, None, 0),
        (0, None, None, 0, None),
        (0, None, 0, None, None),
        (0, 0, None, None, None),
    ):
        fn = torch.vmap(fn, in_dims=dims)
    with _ScalarIndexing():
        return fn(score_BHLM, *at).to(score_BHLM.dtype)


def apply_mask_mod(mask_mod: Callable, at: tuple[Tensor, ...]) -> Tensor:
    """mask_mod on every pair, as bool (B or 1, H or 1, L, M): 1 where it does not look at that index."""
    fn = mask_mod
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        fn = torch.vmap(fn, in_dims=dims)
    with _ScalarIndexing():
        mask = fn(*at)
    for dim in (0, 1):  # vmap expands what did not depend on the index: stride 0
        if mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, 1)
    return mask


def at_offset(mod: Mod, q_offset: int) -> Mod:
    """A score_mod or mask_mod that is given query numbers, and asks `mod` at their positions."""
    if mod is None or q_offset == 0:
        return mod
    asked = mod

    def at_position(*args: Any) -> Any:
        *before, q_idx, kv_idx = args
        return asked(*before, q_idx + q_offset, kv_idx)

    return at_position  # type: ignore[return-value]
