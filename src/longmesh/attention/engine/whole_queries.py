"""Queries that every rank has: each computes its part of them, and every rank gets all results.

forward    q, whole    -> this rank's queries -> attention -> gathered: out, whole on every rank
backward   dout, whole -> this rank's part    -> attention -> gathered: dq, whole on every rank
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longmesh.attention.engine.side import Side


class CutQueries(torch.autograd.Function):
    """This rank's queries of (B, H, tokens, D); the gradient is gathered. Its backward is collective."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, queries: Side) -> Tensor:
        ctx.queries = queries
        return queries.shard(q, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.queries.unshard(gradients[0].contiguous(), 2), None
