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
from longmesh.rules.planned import Part, Planned
from longmesh.rules.rule import Rule
from longmesh.rules.writer import Writer
from longmesh.spec import Layout, Partial, Placement, Replicate, Shard


def foreach_norm(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
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
            results[i] = p.local(_one_of, values, results[i], place)
    return [
        part if t.is_plain else p.wrap(part, t, layout=Layout.replicated(t.global_layout.mesh), shape=())
        for t, part in zip(tensors, results, strict=True)
    ]


def _own(local: torch.Tensor, order: float) -> torch.Tensor:
    """This rank's part; one number that adds nothing in place of an empty one."""
    return local if local.numel() else local.new_full((1,), 0.0 if order >= 0 else math.inf)


def _sharded_alike(tensors: Sequence[Planned]) -> list[list[int]]:
    """The indices of the tensors that are sharded, by mesh and axes."""
    groups: dict[Any, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if not tensor.is_plain and tensor.global_layout.shard_dims:
            axes = tuple(isinstance(q, Shard) for q in tensor.global_layout.placements)
            groups.setdefault((tensor.comm, axes), []).append(i)
    return list(groups.values())


def _combine(p: Writer, norms: list[Part], like: Planned, order: float, has_root: bool) -> Any:
    """One number per tensor from every rank's, in double precision."""
    count = len(norms)
    values = p.local(_stacked, norms)
    if math.isinf(order):
        sign = 1 if order > 0 else -1
        both = _reduce(
            p, p.local(_flagged, values, sign), like, Partial("max" if sign > 0 else "min"), (2, count)
        )
        return p.local(_unflagged, both)
    if not has_root or order == 0:
        return _reduce(p, values, like, Partial(), (count,))
    powers = _reduce(p, p.local(torch.pow, values, order), like, Partial(), (count,))
    return p.local(torch.pow, powers, 1 / order)


def _reduce(p: Writer, values: Part, like: Planned, pending: Partial, shape: tuple[int, ...]) -> Planned:
    whole: Placement = Replicate()
    places = [pending if isinstance(q, Shard) else whole for q in like.global_layout.placements]
    layout = Layout(like.global_layout.mesh, places)
    return p.replicated(p.wrap(values, like, layout=layout, shape=shape, dtype=torch.float64))


def _one_of(values: torch.Tensor, own: torch.Tensor, place: int) -> torch.Tensor:
    return values[place].to(own.dtype)


def _stacked(norms: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(norms).double()


def _flagged(values: torch.Tensor, sign: int) -> torch.Tensor:
    return torch.stack([values.nan_to_num(nan=0.0, posinf=math.inf), values.isnan().double() * sign])


def _unflagged(found: torch.Tensor) -> torch.Tensor:
    return torch.where(found[1] != 0, math.nan, found[0])


NORM = Rule(program=foreach_norm, mixed=True)

RULES: dict[str, Rule] = {"_foreach_norm.Scalar": NORM, "_foreach_powsum.Scalar": NORM}
