"""`DTensor.view` raises where the view would not keep the tensor's layout, and says which fix."""

from __future__ import annotations

import functools
import math
import sys
from typing import Any

from longmesh._torch import is_below_autograd
from longmesh.errors import LongmeshError
from longmesh.rules.reshape import view_route
from longmesh.rules.view import resolved_size
from longmesh.spec import Layout
from longmesh.tensor.tensor_layout import TensorLayout


def check_view(own: TensorLayout, size: tuple[Any, ...]) -> None:
    """Raise if a view as `size`, as torch takes it, can't keep a tensor's layout, and say which fix."""
    dims = tuple(size[0]) if len(size) == 1 and isinstance(size[0], (tuple, list)) else size
    if own.is_symbolic or not own.layout.shard_dims or any(type(dim) is not int for dim in dims):
        return
    refusal = _refusal(own.layout, own.shape, dims)
    if refusal is None:
        own.views.add(dims)
    elif not is_below_autograd() and not _is_asked_by_torch():
        raise LongmeshError(refusal)


@functools.lru_cache(maxsize=4096)
def _refusal(layout: Layout, before: tuple[int, ...], after: tuple[int, ...]) -> str | None:
    if -1 in after:
        after = resolved_size(before, after)
    if math.prod(before) != math.prod(after):
        return None
    route = view_route(layout, before, after)
    if route is None:
        return None
    mesh = layout.mesh
    dim = route.lost[0] if route.lost else route.resized[0][0]
    axes = layout.shard_axes(dim)
    parts = math.prod(mesh.sizes[a] for a in axes)
    over = " and ".join(mesh.axis_name(a) for a in axes)
    if route.lost:
        why = "it is not the first of the dims that are merged or split with it"
    else:
        size = after[route.resized[0][1]] if after[route.resized[0][1]] % parts else before[dim]
        why = f"{size} is not a multiple of it"
    return (
        f"cannot view {tuple(before)} as {after}: dim {dim} is sharded over {over} ({parts} ranks) and {why}; use "
        "reshape(), which may redistribute, or redistribute to Replicate() first"
    )


def _is_asked_by_torch() -> bool:
    """Whether torch's own modules call `view`, as multi_head_attention_forward does: they would take a copy as well."""
    return sys._getframe(3).f_globals.get("__name__", "").startswith("torch.nn.")
