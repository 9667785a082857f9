"""Views along a cut dim whose pieces don't fit the new shape.

(5, 2) -> (10) over 4 ranks: the ranks hold 4 4 2 0 elements where chunking wants 3 3 3 1. The elements are in
order, so one exchange of the flat group restores chunking; only a cut that is not the leading dim of its
group has to be gathered. `DTensor.view` refuses both, `reshape` and torch's own internals do them.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch._ops import OpOverload

from longmesh.comm import comm_of
from longmesh.comm.intervals import exchange_intervals
from longmesh.rules.view import resolved_size, view_groups
from longmesh.spec import Layout
from longmesh.tensor.autograd import move
from longmesh.tensor.dispatch import USUAL, Handler
from longmesh.tensor.dtensor import DTensor
from longmesh.tensor.meta import global_stride
from longmesh.tensor.op_facts import is_view
from longmesh.tensor.ops.index import linear_or_reduced
from longmesh.tensor.ops.recut import interval
from longmesh.tensor.view_origin import remember_origin
from longmesh.tensor.view_route import ViewRoute, view_route

aten = torch.ops.aten


def view(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    held = tensor._tensor_layout
    if held.is_symbolic or not held.layout.shard_dims:
        return USUAL
    route, after = _planned(held.layout, held.shape, tuple(args[1] if len(args) > 1 else kwargs["size"]))
    if route is None or not route.resized:
        return USUAL
    result = _exchange(tensor, route, after)
    if is_view(func):
        remember_origin(result, func, args, kwargs)
    return result


@functools.lru_cache(maxsize=4096)
def _planned(
    layout: Layout, before: tuple[int, ...], size: tuple[int, ...]
) -> tuple[ViewRoute | None, tuple[int, ...]]:
    after = resolved_size(before, size)
    if math.prod(before) != math.prod(after):
        raise RuntimeError(f"shape '{list(size)}' is invalid for a tensor of shape {tuple(before)}")
    return view_route(layout, tuple(before), after), after


def _exchange(tensor: DTensor, route: ViewRoute, after: tuple[int, ...]) -> DTensor:
    tensor = linear_or_reduced(tensor)
    if route.source.placements != tensor._layout.placements:
        route = view_route(tensor._layout, tuple(tensor.shape), after) or route
        tensor = move(tensor, route.source)
    before, comm = tuple(tensor.shape), comm_of(tensor._mesh)
    groups = view_groups(before, after)
    local = tensor._local_tensor
    kept = route.source.local_shape(before, comm.coordinate)
    local = local.reshape([math.prod(kept[d] for d in old) for old, _ in groups])
    for number, (old, new) in enumerate(groups):
        if (old[0], new[0]) not in route.resized:
            continue
        dim, to = old[0], new[0]
        total = math.prod(before[d] for d in old)
        group = comm.group(tuple(sorted(route.source.cuts(dim))))
        local = exchange_intervals(
            [local],
            have=tuple((_scaled(route.source, dim, before[dim], total, c),) for c in group.members),
            want=tuple(_scaled(route.result, to, after[to], total, c) for c in group.members),
            dim=number,
            group=group,
        )
    local = local.reshape(route.result.local_shape(after, comm.coordinate))
    return DTensor(local, tensor._mesh, route.result, after, global_stride(after, local))


def _scaled(layout: Layout, dim: int, size: int, total: int, where: tuple[int, ...]) -> tuple[int, int]:
    """A rank's interval of a dim in elements of its group."""
    start, length = interval(layout, dim, size, where)
    return start * (total // size), length * (total // size)


HANDLERS: dict[OpOverload, Handler] = dict.fromkeys((aten.view.default, aten._unsafe_view.default), view)
