"""Views along a sharded dim whose pieces don't fit the new shape.

(5, 2) -> (10) over 4 ranks: the ranks have 4 4 2 0 elements where chunking wants 3 3 3 1. The elements are in
order, so one exchange of the flat group restores chunking; only a sharded dim that is not the leading one of its
group has to be gathered. `DTensor.view` refuses both, `reshape` and torch's own internals do them.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from longmesh._torch import OpOverload, aten
from longmesh.rules.view import resolved_size, view_groups
from longmesh.spec import Coordinate, Layout
from longmesh.tensor.make_plan import Family
from longmesh.tensor.op_facts import bind
from longmesh.tensor.planned import Planned
from longmesh.tensor.planner import USUAL, Planner
from longmesh.tensor.view_route import ViewRoute, view_route


def view(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    own = args[0]._tensor_layout
    if own.is_symbolic or not own.layout.shard_dims:
        return USUAL
    size = tuple(bind(func, args, kwargs)["size"])
    route, after = _planned(own.layout, own.shape, size)
    if route is None or not route.resized:
        return USUAL
    return _exchange(p, args[0], route, after)


@functools.lru_cache(maxsize=4096)
def _planned(
    layout: Layout, before: tuple[int, ...], size: tuple[int, ...]
) -> tuple[ViewRoute | None, tuple[int, ...]]:
    after = resolved_size(before, size)
    if math.prod(before) != math.prod(after):
        raise RuntimeError(f"shape '{list(size)}' is invalid for a tensor of shape {tuple(before)}")
    return view_route(layout, tuple(before), after), after


def _exchange(p: Planner, tensor: Planned, route: ViewRoute, after: tuple[int, ...]) -> Planned:
    tensor = p.linear_or_reduced(tensor)
    if route.source.placements != tensor._layout.placements:
        route = view_route(tensor._layout, tuple(tensor.shape), after) or route
        tensor = p.redistribute(tensor, route.source)
    before, where = tuple(tensor.shape), tensor._tensor_layout.comm.coordinate
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


FAMILIES: dict[OpOverload, Family] = dict.fromkeys((aten.view.default, aten._unsafe_view.default), view)
