"""view and reshape: whether every sharded dim keeps its pieces, and what it takes where one doesn't.

(5, 2) -> (10) over 4 ranks: the ranks have 4 4 2 0 elements where chunking wants 3 3 3 1. The elements are in
order, so one exchange of the flat group restores chunking; only a sharded dim that is not the leading one of its
group has to be gathered. `DTensor.view` refuses both, `reshape` and torch's own internals do them.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch

from longmesh._torch import OpOverload
from longmesh.rules.planned import Planned
from longmesh.rules.rule import Rule, arguments_of
from longmesh.rules.view import reshape_locally, resolved_size, view_groups, view_lines, view_meta
from longmesh.rules.writer import Writer
from longmesh.spec import Coordinate, Layout, Shard


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


def view(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    own = args[0]._tensor_layout
    if own.is_symbolic or not own.layout.shard_dims:
        return p.by_lines(func, args, kwargs)
    size = tuple(arguments_of(func, args, kwargs)["size"])
    route, after = _planned(own.layout, own.shape, size)
    if route is None or not route.resized:
        return p.by_lines(func, args, kwargs)
    return _exchange(p, args[0], route, after)


@functools.lru_cache(maxsize=4096)
def _planned(
    layout: Layout, before: tuple[int, ...], size: tuple[int, ...]
) -> tuple[ViewRoute | None, tuple[int, ...]]:
    after = resolved_size(before, size)
    if math.prod(before) != math.prod(after):
        raise RuntimeError(f"shape '{list(size)}' is invalid for a tensor of shape {tuple(before)}")
    return view_route(layout, tuple(before), after), after


def _exchange(p: Writer, tensor: Planned, route: ViewRoute, after: tuple[int, ...]) -> Planned:
    tensor = p.linear_or_reduced(tensor)
    if route.source.placements != tensor.global_layout.placements:
        route = view_route(tensor.global_layout, tuple(tensor.shape), after) or route
        tensor = p.redistribute(tensor, route.source)
    before, where = tuple(tensor.shape), tensor.coordinate
    groups = view_groups(before, after)
    kept = tensor.local_shape
    sizes = [math.prod(kept[d] for d in old) for old, _ in groups]
    flat: Any = p.local(torch.reshape, tensor, list(sizes))
    for number, (old, new) in enumerate(groups):
        if (old[0], new[0]) not in route.resized:
            continue
        dim, to = old[0], new[0]
        total = math.prod(before[d] for d in old)

        def have(c: Coordinate, dim: int = dim, total: int = total) -> tuple[tuple[int, int], ...]:
            return (_scaled(route.source, dim, before[dim], total, c),)

        def want(c: Coordinate, to: int = to, total: int = total) -> tuple[int, int]:
            return _scaled(route.result, to, after[to], total, c)

        row = math.prod(n for d, n in enumerate(sizes) if d != number)
        axes = tuple(sorted(route.source.shard_axes(dim)))
        flat = p.exchange_into([flat], tensor, number, have, want, axes=axes, row=row)
        sizes[number] = want(where)[1]
    local = p.local(torch.reshape, flat, list(route.result.local_shape(after, where)))
    return p.wrap(local, tensor, layout=route.result, shape=after)


def _scaled(layout: Layout, dim: int, size: int, total: int, where: Coordinate) -> tuple[int, int]:
    """A rank's interval of a dim in elements of its group."""
    start, length = layout.interval(dim, size, where)
    return int(start) * (total // size), int(length) * (total // size)


VIEW = Rule(view_lines, view_meta, local_op=reshape_locally, program=view)

RULES: dict[str, Rule] = {"view.default": VIEW, "_unsafe_view.default": VIEW}
