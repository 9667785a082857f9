"""einsum seen whole: by its rule where the equation is plain, else by torch's own decomposition."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from longmesh.rules.product import einsum_terms
from longmesh.tensor.dispatch import USUAL, Handler
from longmesh.tensor.one_by_one import plan_one_by_one


def einsum(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    equation, operands = args
    if einsum_terms(equation, [tuple(t.shape) for t in operands]) is not None:
        return USUAL
    return plan_one_by_one(func)


HANDLERS: dict[OpOverload, Handler] = {torch.ops.aten.einsum.default: einsum}
