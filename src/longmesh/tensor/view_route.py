"""Whether a view keeps a tensor's layout, and what it takes where it doesn't. Pure."""

from __future__ import annotations

import functools
import math
import sys
from dataclasses import dataclass
from typing import Any

from longmesh._torch import is_below_autograd
from longmesh.errors import LongmeshError
from longmesh.rules.view import resolved_size, view_groups
from longmesh.spec import Layout, Shard
from longmesh.tensor.tensor_layout import TensorLayout


@dataclass(frozen=True, slots=True)
class ViewRoute:
    """How a view of a sharded tensor runs when its pieces don't fit: gather `lost` dims, exchange `resized` groups."""

    lost: tuple[int, ...]
    resized: tuple[tuple[int, int], ...]
    source: Layout
    result: Layout


@functools.lru_cache(maxsize=4096)
def view_route(layout: Layout, before: tuple[int, ...], after: tuple[int, ...]) -> ViewRoute | None:
    """The route of a view, or None where every sharded dim keeps its pieces. Pure."""
    if 0 in before or not layout.shard_dims:
        return None
    leads = {old[0]: (new[0], len(old) == len(new) == 1) for old, new in view_groups(before, after)}
    ones = [d for d, size in enumerate(after) if size == 1]
    lost: list[int] = []
    moved: dict[int, int] = {}
    resized: list[tuple[int, int]] = []
    for dim, axes in layout.shard_order:
        parts = math.prod(layout.mesh.sizes[a] for a in axes)
        if dim in leads:
            new, same = leads[dim]
            moved[dim] = new
            if not same and (before[dim] % parts or after[new] % parts):
                resized.append((dim, new))
        elif before[dim] == 1 and ones:
            moved[dim] = min(ones, key=lambda o: (abs(o - dim), o))
        else:
            lost.append(dim)
    if not lost and not resized:
        return None
    if resized:  # a rank may hold nothing of a dim of size 1, and so nothing to exchange
        lost += [dim for dim in moved if before[dim] == 1]
    source = layout.with_replicated([axis for dim in lost for axis in layout.shard_axes(dim)])
    placements = [Shard(moved[p.dim]) if isinstance(p, Shard) else p for p in source.placements]
    order: dict[int, tuple[int, ...]] = {}
    for dim, axes in source.shard_order:
        if moved[dim] in order:  # two dims of size 1 that end up in one: left to the rule
            return ViewRoute(tuple(lost), (), layout, layout)
        order[moved[dim]] = axes
    return ViewRoute(
        tuple(lost), tuple(resized), source, Layout(layout.mesh, placements, list(order.items()))
    )


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
