"""Views that had to be copied: what is written to them goes back to where they came from.

    x = distribute_tensor(..., [Shard(0)])
    x[0] = 5            # select, then fill_: row 0 lies on one rank, so the view is a copy everywhere

A view of a cut dim may hold moved data. It remembers its origin, and so do views of it; an in-place op on any of
them is followed by the inverse of the view, written to the origin.

Pitfall: such a view is a copy of what its origin held when it was made. Later writes to the origin don't show in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

from longmesh.errors import LongmeshError

aten = torch.ops.aten


class ViewOrigin(NamedTuple):
    """The tensor a view was made of and how: op, its other arguments by name, which of its outputs."""

    base: Any
    func: OpOverload
    given: dict[str, Any]
    number: int


def remember_origin(result: Any, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note on a view (or the views that an op gives) where it comes from."""
    names = [a.name for a in func._schema.arguments]
    defaults = {a.name: a.default_value for a in func._schema.arguments}
    given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
    base = given.pop(names[0])
    views = result if isinstance(result, (list, tuple)) else [result]
    for number, view in enumerate(views):
        view._origin = ViewOrigin(base, func, given, number)


def write_to_origin(view: Any, move: Callable[..., Any]) -> None:
    """Bring what was written to a view home, and from there on if that is a view, too. Collective."""
    while view._origin is not None:
        base = view._origin.base
        whole = _inverse(view, *view._origin)
        base._local_tensor.copy_(move(whole, base._layout)._local_tensor.clone())  # they may overlap
        view = base


def _inverse(view: Any, base: Any, func: OpOverload, given: dict[str, Any], number: int) -> Any:
    """`base` with `view` in the place it was taken from."""
    match func._overloadpacket._qualified_op_name.removeprefix("aten::"):
        case "slice":
            return aten.slice_scatter(base, view, given["dim"], given["start"], given["end"], given["step"])
        case "select":
            return aten.select_scatter(base, view, given["dim"], given["index"])
        case "diagonal":
            return aten.diagonal_scatter(base, view, given["offset"], given["dim1"], given["dim2"])
        case "as_strided":
            size, stride, offset = given["size"], given["stride"], given["storage_offset"]
            return aten.as_strided_scatter(base, view, size, stride, offset)
        case "unbind":
            return aten.select_scatter(base, view, given["dim"], number)
        case "split" | "split_with_sizes":
            start = (
                sum(given["split_sizes"][:number]) if "split_sizes" in given else number * given["split_size"]
            )
            return aten.slice_scatter(base, view, given["dim"], start, start + view.shape[given["dim"]], 1)
        case "view" | "squeeze" | "unsqueeze" if "dtype" not in given:
            return aten.reshape(view, base.shape)
        case "permute":
            dims = [d % base.ndim for d in given["dims"]]
            return aten.permute(view, [dims.index(d) for d in range(base.ndim)])
        case "transpose":
            return aten.transpose(view, given["dim0"], given["dim1"])
        case "t":
            return aten.t(view)
        case "alias" | "detach":
            return view
        case "view_as_real":
            return aten.view_as_complex(view)
        case "view_as_complex":
            return aten.view_as_real(view)
        case _:
            raise LongmeshError(
                f"can't write in place to this view: {func} of a tensor laid out as {base._layout} had to move its "
                "data, and has no inverse; write to the tensor itself, or redistribute it to Replicate() first"
            )
