"""Views that had to be copied: read and written through the tensor that they are views of.

    x = distribute_tensor(..., [Shard(0)])
    row = x[0]          # on one rank only, so the view is a copy
    x.mul_(3)           # row is read again before it is used
    row.add_(1)         # written to x, too

A view along a sharded dim may hold redistributed data. It remembers its origin: its base, the view op, and how many
writes torch had counted; torch counts the writes to a tensor and to all its views together, and alike on every rank.
An op on such a view is a plan of one step (one_by_one.py): read the view again if there were writes, run the op, and if
that wrote to the view, write the inverse of the view to the base. A view of such a view remembers its origin, too.

Pitfall: torch does not count what is written to a local tensor (`x.to_local().zero_()`): older views don't see it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from longmesh._torch import (
    OpOverload,
    aten,
    below_autograd,
    increment_version,
    is_out_of_trace,
    schema_of,
    write_count,
)
from longmesh.comm import run_plan
from longmesh.errors import LongmeshError
from longmesh.rules.op_facts import functional_form, is_view, written_arguments
from longmesh.rules.rule import arguments_of
from longmesh.rules.tree import all_tensors
from longmesh.tensor.dtensor import DTensor, wrap
from longmesh.tensor.tensor_layout import version_of


class ViewOrigin(NamedTuple):
    """Where a view comes from: `base`, a DTensor of our own on the memory that the base had (the user's may get another
    memory or shape), the op and its other arguments by name. `version`: the writes that `counted` had when the view
    was read; None if it has to be read again. Without `func` the base is not known here (`forget_base`)."""

    base: DTensor
    func: OpOverload | None
    given: dict[str, Any]
    counted: DTensor
    version: int | None


def remember_origin(result: Any, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note on a view (or the views that an op gives) where it comes from."""
    _remember(result, _alias(args[0]), args[0], func, args, kwargs)


def _remember(
    result: Any,
    base: DTensor,
    counted: DTensor,
    func: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    _, *others = arguments_of(func, args, kwargs).items()
    given = dict(others)
    views = result if isinstance(result, (list, tuple)) else [result]
    version = version_of(counted)
    start = 0
    for number, view in enumerate(views):
        op = func
        if op is aten.unbind.int:  # of several views each remembers an op that makes it alone
            op, given = aten.select.int, {"dim": given["dim"], "index": number}
        elif isinstance(result, (list, tuple)):
            dim = given["dim"]
            op, end = aten.slice.Tensor, start + view.shape[dim]
            given = {"dim": dim, "start": start, "end": end, "step": 1}
            start = end
        view._origin = ViewOrigin(base, op, given, counted, version)
        view._tensor_layout = view._tensor_layout.as_copied_view(True)


# The DTensors that functions which are being traced were given.
given_to_traces: Any = WeakTensorKeyDictionary()


def forget_base(view: DTensor) -> None:
    """In a compiled function: `view` is a copied view that it was given, and its base is outside."""
    alias = _alias(view)
    seen: Any = WeakTensorKeyDictionary()  # those of earlier traces may have been written to
    for tensor in given_to_traces:
        seen[tensor] = write_count(tensor)
    view._origin = ViewOrigin(alias, None, {"seen": seen}, alias, version_of(alias))
    view._tensor_layout = view._tensor_layout.as_copied_view(True)


def await_softmax(scores: DTensor, otherwise: str) -> DTensor:
    """The sum of attention's scores and a mask, if its next use is attention's softmax: any other raises."""
    alias = _alias(scores)
    scores._origin = ViewOrigin(alias, None, {"otherwise": otherwise}, alias, None)
    scores._tensor_layout = scores._tensor_layout.as_copied_view(True)
    return scores


def _alias(tensor: DTensor) -> DTensor:
    """A DTensor on the same memory that ops read and write directly, copied view or not."""
    alias = wrap(tensor._local_tensor, tensor._tensor_layout.as_copied_view(False))
    alias._origin = tensor._origin
    return alias


def is_outdated(tensor: DTensor) -> bool:
    """Whether it is a view that has to be read again before its local tensor is used. Of a view whose base is not known
    here: whether a tensor was written to that may be its base."""
    origin = tensor._origin
    if origin is None:
        return False
    if "otherwise" in origin.given:
        return True
    if origin.func is None:
        seen = origin.given["seen"]
        return any(write_count(t) != seen.get(t, 0) and t._mesh == tensor._mesh for t in given_to_traces)
    return origin.version != version_of(origin.counted)


def refresh(view: DTensor) -> None:
    """Read a view again if there were writes to its base. Collective where the view op is."""
    if is_outdated(view):
        check_known(view)
        assert view._origin is not None
        if view._origin.func is None:
            raise LongmeshError(
                f"a compiled function reads a view of shape {tuple(view.shape)} that it was given, and that had to be "
                "copied, after it has written to another tensor that it was given, which may be its base: the copy may "
                "be outdated; take the view inside of the function, or give it view.clone()"
            )
        if is_out_of_trace(view._local_tensor):
            raise LongmeshError(
                f"a compiled function returns a view of shape {tuple(view.shape)} that it has written to, and had to "
                f"copy: its base is laid out as {view._origin.base._layout}; return a copy, view.clone(), or the base"
            )
        with torch.no_grad(), below_autograd():
            _read(view, version_of(view._origin.counted))


def check_known(view: DTensor) -> None:
    """Raise where it is a sum that waits for attention's softmax, and is used otherwise."""
    if view._origin is not None and "otherwise" in view._origin.given:
        raise LongmeshError(view._origin.given["otherwise"])


def _read(view: DTensor, version: int) -> None:
    origin = view._origin
    if origin is None or origin.version == version:
        return
    _read(origin.base, version)
    assert origin.func is not None, "nothing writes to the base of a view that a compiled function was given"
    fresh = origin.func(origin.base, **origin.given)
    own, layout = fresh._tensor_layout, view._layout
    local = fresh._local_tensor
    view._local_tensor = local if own.layout is layout else run_plan(own.route(layout), local, own.comm)
    view._reduced = None
    view._tensor_layout = view._tensor_layout.remembering(None)
    view._origin = origin._replace(version=version)


def run_on_views(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An op some of whose arguments are copied views. Collective where the op or the views are."""
    if func is aten._safe_softmax.default and "otherwise" in args[0]._origin.given:
        with _shown([args[0]]), below_autograd():
            return func(*args, **kwargs)
    found = {id(t): t for t in all_tensors((args, kwargs)) if isinstance(t, DTensor)}
    views = [t for t in found.values() if t._origin is not None]
    for view in views:
        check_known(view)
    writes = {id(t) for t in all_tensors(written_arguments(func, args, kwargs))}
    if len(views) < len(found) or len(views) > 1:
        members = _members(func, args) if writes else []
        if len(members) > 1:
            for member in members:
                func(*member, **kwargs)
            return None
    is_new_shape = torch.Tag.inplace_view in func.tags
    written = [] if is_new_shape else [view for view in views if id(view) in writes]
    for view in written:
        _check_writable(view)
    for view in views:
        refresh(view)
    before = _alias(args[0]) if is_new_shape else None
    with _shown(views), below_autograd():
        result = func(*args, **kwargs)
        for view in written:
            _write_to_base(view)
    if before is not None:  # squeeze_ and its like: the same tensor is another view now
        op = functional_form(func)
        assert op is not None and result._origin is not None, f"{func} has a form that returns a view"
        _remember(result, before, result._origin.counted, op, args, kwargs)
    elif is_view(func) and args[0]._origin is not None:
        remember_origin(result, func, args, kwargs)
    return result


def _members(func: OpOverload, args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """The calls that an op which writes to a list stands for, one for each of its members: a member may be a view of
    another, so each is written before the next is read."""
    if not isinstance(args[0], (list, tuple)):
        return []
    is_foreach = _name(func).startswith("_foreach_")

    def of_member(value: Any, i: int) -> Any:
        is_list = isinstance(value, (list, tuple)) or (
            is_foreach and isinstance(value, torch.Tensor) and value.ndim > 0  # addcmul's: a number for each
        )
        return value[i : i + 1] if is_list else value

    return [tuple(of_member(a, i) for a in args) for i in range(len(args[0]))]


@contextmanager
def _shown(views: list[DTensor]) -> Iterator[None]:
    """Ops on the views are ops on what they show. After an error they are read again: it may be half written."""
    for view in views:
        view._tensor_layout = view._tensor_layout.as_copied_view(False)
    try:
        yield
    except BaseException:
        for view in views:
            assert view._origin is not None
            view._origin = view._origin._replace(version=None)
        raise
    finally:
        for view in views:
            view._tensor_layout = view._tensor_layout.as_copied_view(True)


def _write_to_base(view: DTensor) -> None:
    """Write what a view shows to its base, and from there on if that is a view, too. Collective."""
    while view._origin is not None:
        base, func, given, counted, _ = view._origin
        if not counted.is_inference():
            increment_version([counted])
        assert func is not None, "checked before the op"
        aten.copy_(base, aten.clone(_INVERSES[_name(func)](base, view, given)))  # they may overlap
        view = base


def _check_writable(view: DTensor) -> None:
    while view._origin is not None:
        base, func, _, _, _ = view._origin
        if func is None:
            raise LongmeshError(
                f"a compiled function writes in place to a view of shape {tuple(view.shape)} that it was given, and "
                f"that had to be copied to be laid out as {base._layout}: the write would not reach the tensor that it "
                "is a view of; write outside of the compiled function, or give it the tensor itself"
            )
        if _name(func) not in _INVERSES:
            raise LongmeshError(
                f"can't write in place to this view: {func} of a tensor laid out as {base._layout} had to redistribute "
                "its data, and has no inverse; write to the tensor itself, or redistribute it to Replicate() first"
            )
        view = base


def _name(func: OpOverload) -> str:
    return schema_of(func).name.removeprefix("aten::")


def _reshaped(base: Any, view: Any, given: dict[str, Any]) -> Any:
    return aten.reshape(view, base.shape) if "dtype" not in given else aten.view.dtype(view, base.dtype)


def _permuted(base: Any, view: Any, given: dict[str, Any]) -> Any:
    dims = [d % base.ndim for d in given["dims"]]
    return aten.permute(view, [dims.index(d) for d in range(base.ndim)])


# View op -> `base` with `view` in the place that it was taken from: (base, view, arguments by name).
_INVERSES: dict[str, Callable[[Any, Any, dict[str, Any]], Any]] = {
    "slice": lambda base, view, a: aten.slice_scatter(base, view, a["dim"], a["start"], a["end"], a["step"]),
    "select": lambda base, view, a: aten.select_scatter(base, view, a["dim"], a["index"]),
    "diagonal": lambda base, view, a: aten.diagonal_scatter(base, view, a["offset"], a["dim1"], a["dim2"]),
    "as_strided": lambda base, view, a: aten.as_strided_scatter(
        base, view, a["size"], a["stride"], a["storage_offset"]
    ),
    "view": _reshaped,
    "squeeze": _reshaped,
    "unsqueeze": _reshaped,
    "permute": _permuted,
    "transpose": lambda base, view, a: aten.transpose(view, a["dim0"], a["dim1"]),
    "t": lambda base, view, a: aten.t(view),
    "alias": lambda base, view, a: view,
    "detach": lambda base, view, a: view,
    "_conj": lambda base, view, a: aten.conj_physical(view),
    "_neg_view": lambda base, view, a: aten.neg(view),
    "view_as_real": lambda base, view, a: aten.view_as_complex(view),
    "view_as_complex": lambda base, view, a: aten.view_as_real(view),
}
