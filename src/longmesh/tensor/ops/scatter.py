"""Scattered extrema: a pending sum is reduced once, and remembered for the gradient.

The gradient goes to the elements that equal the result, bit for bit, and reads its operands a second time. Two
reductions of one pending sum may add in different orders.
"""

from __future__ import annotations

from typing import Any

import torch

from longmesh._torch import OpOverload
from longmesh.tensor.make_plan import Family
from longmesh.tensor.planner import Planner
from longmesh.tensor.tree import map_tensors

aten = torch.ops.aten


def reduce_once(p: Planner, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """scatter_reduce and index_reduce."""
    args, kwargs = map_tensors(p.reduced_for_good, (args, kwargs))
    return p.by_rule(func, args, kwargs)


FAMILIES: dict[OpOverload, Family] = dict.fromkeys(
    (aten.scatter_reduce.two, aten.index_reduce.default), reduce_once
)
