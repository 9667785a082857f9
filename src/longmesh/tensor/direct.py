"""The direct path: a torch function on DTensors that comes down to the same function on their local parts.

The first call of a function with given layouts and arguments runs as usual, and is watched: if every op it made
ran on the local parts as they lie (nothing moved, no argument depended on the rank), then the function itself may be
called on the local parts from then on. That skips torch's dispatcher, which costs more than everything else.

Not taken where a gradient is needed, inside dispatch modes, functorch, autocast or a compiler. Views are taken only
without grad mode: autograd must know a view that may be written to later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack  # pyright: ignore[reportAttributeAccessIssue]
from torch._C._functorch import peek_interpreter_stack
from torch.autograd.graph import increment_version

from longmesh.tensor.dispatch import PLAIN, SYMBOLIC, describe, watched, wrap
from longmesh.tensor.dtensor import DTensor
from longmesh.tensor.op_plan import OpPlan, Output
from longmesh.tensor.tree import all_tensors

_is_grad_enabled = torch.is_grad_enabled
_is_autocast_enabled = torch.is_autocast_enabled
_detach = torch.Tensor.detach


class _Replay:
    """Call the function on the local parts and wrap as `output`; None: it wrote to its first argument. `is_view`
    results need autograd to know them."""

    __slots__ = ("is_view", "output")

    def __init__(self, output: Output | None, is_view: bool) -> None:
        self.output = output
        self.is_view = is_view


class DirectPath:
    """The functions that may be called on local parts, by function and how its arguments are held."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], _Replay | None] = {}

    def __call__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _is_autocast_enabled("cpu") or _len_torch_dispatch_stack() or peek_interpreter_stack() is not None:
            return func(*args, **kwargs)
        grad = _is_grad_enabled()
        parts: list[Any] = [func]
        held = describe(args, parts, None)
        if kwargs:
            for name, value in kwargs.items():
                parts.append(name)
                held = describe((value,), parts, held)
        if held is None or (grad and _needs_grad(args, kwargs)):
            return func(*args, **kwargs)
        key = tuple(parts)
        try:
            replay = self._known.get(key, self)
        except TypeError:
            return func(*args, **kwargs)
        if replay is None:
            return func(*args, **kwargs)
        if replay is self:
            return self._watch(func, args, kwargs, key)
        assert isinstance(replay, _Replay)
        if replay.is_view or replay.output is None:
            if grad and replay.is_view:
                return func(*args, **kwargs)
            if getattr(args[0], "_origin", None) is not None:  # a write goes on to where the view comes from
                return func(*args, **kwargs)
        local_args = [
            a._local_tensor
            if type(a) is DTensor
            else _to_local(a)
            if type(a) is list or type(a) is tuple
            else a
            for a in args
        ]
        local_kwargs = {k: _to_local(v) for k, v in kwargs.items()} if kwargs else kwargs
        result = func(*local_args, **local_kwargs)
        if replay.output is None:
            increment_version(args[0])
            return args[0]
        return wrap(result, replay.output, held.mesh)

    def _watch(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], key: tuple[Any, ...]
    ) -> Any:
        """Run as usual, and note whether the local parts alone would have done."""
        log: list[tuple[OpPlan | None, Any]] = []
        token = watched.set(log)
        try:
            result = func(*args, **kwargs)
        finally:
            watched.reset(token)
        if any(part is mark for part in key for mark in (PLAIN, SYMBOLIC)):
            return result
        replay = None
        stays = log and all(plan is not None and plan.is_local for plan, _ in log)
        if stays and type(result) is DTensor and result._lookup is None:
            own = result._held
            written = len(log) == 1 and args and result is args[0]
            is_view = func is not _detach and not written and _shares_memory(result, args, kwargs)
            if written or all(plan is not None and plan.written is None for plan, _ in log):
                replay = _Replay(None if written else Output(own.layout, own.shape, own.stride), is_view)
        self._known[key] = replay
        return result


def _to_local(value: Any) -> Any:
    kind = type(value)
    if kind is DTensor:
        return value._local_tensor
    if kind is list or kind is tuple:
        return kind([_to_local(v) for v in value])
    return value


def _needs_grad(args: Any, kwargs: Any) -> bool:
    for value in args:
        kind = type(value)
        if kind is DTensor:
            if value.requires_grad:
                return True
        elif (kind is list or kind is tuple) and _needs_grad(value, None):
            return True
    return bool(kwargs) and _needs_grad(tuple(kwargs.values()), None)


def _shares_memory(result: DTensor, args: Any, kwargs: Any) -> bool:
    address = result._local_tensor.untyped_storage().data_ptr()
    inputs = [t._local_tensor for t in all_tensors((args, kwargs)) if isinstance(t, DTensor)]
    return any(t.untyped_storage().data_ptr() == address for t in inputs)


direct = DirectPath()
