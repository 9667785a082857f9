"""Norms of lists of tensors: a local norm each, and one small collective for all that are sharded alike.

What travels is one number per tensor (its local norm to the power p, in double precision) and a flag for NaN,
which minima and maxima would lose. A rank with an empty part takes part with the norm of nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from longmesh._torch import OpOverload, aten
from longmesh.spec import Layout, Partial, Placement, Replicate, Shard
from longmesh.tensor.make_plan import Family
from longmesh.tensor.planned import Part, Planned
from longmesh.tensor.planner import Planner


def foreach_norm(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """_foreach_norm and _foreach_powsum."""
    tensors: list[Planned] = [t if t.is_plain else p.reduced(t) for t in args[0]]
    order = float(args[1] if len(args) > 1 else kwargs.get("ord", 2))
    parts = [t if t.is_plain or not t.numel() else p.local(_own, t, order) for t in tensors]
    results = list(p.locals(len(parts), func, parts, *args[1:], **kwargs))
    has_root = func is aten._foreach_norm.Scalar
    for members in _sharded_alike(tensors):
        first = tensors[members[0]]
        values = _combine(p, [results[i] for i in members], first, order, has_root)
        for place, i in enumerate(members):
            results[i] = p.local(lambda all_, own, n=place: all_[n].to(own.dtype), values, results[i])
    return [
        part if t.is_plain else p.wrap(part, t, layout=Layout.replicated(t._layout.mesh), shape=())
        for t, part in zip(tensors, results, strict=True)
    ]


def _own(local: torch.Tensor, order: float) -> torch.Tensor:
    """This rank's part; one number that adds nothing in place of an empty one."""
    return local if local.numel() else local.new_full((1,), 0.0 if order >= 0 else math.inf)


def _sharded_alike(tensors: Sequence[Planned]) -> list[list[int]]:
    """The indices of the tensors that are sharded, by mesh and axes."""
    groups: dict[Any, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if not tensor.is_plain and tensor._layout.shard_dims:
            axes = tuple(isinstance(q, Shard) for q in tensor._layout.placements)
            groups.setdefault((tensor._tensor_layout.comm, axes), []).append(i)
    return list(groups.values())


def _combine(p: Planner, norms: list[Part], like: Planned, order: float, has_root: bool) -> Any:
    """One number per tensor from every rank's, in double precision."""
    count = len(norms)
    values = p.local(lambda found: torch.stack(found).double(), norms)
    if math.isinf(order):
        sign = 1 if order > 0 else -1

        def flagged(values: torch.Tensor) -> torch.Tensor:
            return torch.stack([values.nan_to_num(nan=0.0, posinf=math.inf), values.isnan().double() * sign])

        both = _reduce(p, p.local(flagged, values), like, Partial("max" if sign > 0 else "min"), (2, count))
        return p.local(lambda found: torch.where(found[1] != 0, math.nan, found[0]), both)
    if not has_root or order == 0:
        return _reduce(p, values, like, Partial(), (count,))
    powers = _reduce(p, p.local(torch.pow, values, order), like, Partial(), (count,))
    return p.local(torch.pow, powers, 1 / order)


def _reduce(p: Planner, values: Part, like: Planned, pending: Partial, shape: tuple[int, ...]) -> Planned:
    whole: Placement = Replicate()
    places = [pending if isinstance(q, Shard) else whole for q in like._layout.placements]
    layout = Layout(like._layout.mesh, places)
    return p.replicated(p.wrap(values, like, layout=layout, shape=shape, dtype=torch.float64))


MIXED: dict[OpOverload, Family] = {
    aten._foreach_norm.Scalar: foreach_norm,
    aten._foreach_powsum.Scalar: foreach_norm,
}
