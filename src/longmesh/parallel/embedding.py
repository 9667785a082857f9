"""A sharded Embedding.

    by columns   table S(1): every rank looks up its columns of every row     -> S(-1)
    by rows      table S(0): every rank looks up the rows that are its own    -> P, zeros elsewhere

The gradient of the table stays sharded as the table is: each rank makes that of its own part, without communication.
It is dense, with `sparse=True` too: a DTensor is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from longmesh.parallel.layer import Layer, has_placement
from longmesh.parallel.style import arrange, enter, leave
from longmesh.rules.planned import Planned
from longmesh.spec import Placement, Replicate, Shard
from longmesh.tensor import DTensor
from longmesh.tensor.planner import Planner

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class EmbeddingLayer(Layer):
    """F.embedding(indices, table, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)."""

    by_rows: bool

    @property
    def weight_placement(self) -> Placement:
        return Shard(0 if self.by_rows else 1)

    def run_by_ops(self, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        given = enter(x, self.mesh, self.input_layout, self.argument)
        result = F.embedding(arrange(given, Replicate()), *arguments)
        assert isinstance(result, DTensor)
        return leave(result, self.output_layout, local=self.local_output)

    def is_usual(self, x: torch.Tensor, parameters: tuple[Any, ...], options: tuple[Any, ...]) -> bool:
        _, max_norm, *_ = options
        return max_norm is None and has_placement(parameters[0], self.weight_placement)

    def forward(
        self, p: Planner, options: tuple[Any, ...], x: Planned, *parameters: Any
    ) -> Sequence[Planned]:
        (table,) = parameters
        taken = p.redistribute(x, self.on_mesh(Replicate(), x))
        result = p.op(aten.embedding.default, (table, taken), {})
        return p.redistribute(result, self.on_mesh(self.output_layout, result)), taken

    def backward(
        self,
        p: Planner,
        options: tuple[Any, ...],
        needs: tuple[bool, ...],
        grad: Planned,
        taken: Planned,
        *kept: Any,
    ) -> Sequence[Planned | None]:
        (table,), (padding, _, _, by_frequency, _) = kept, options
        grad = p.redistribute(grad, self.on_mesh(Replicate() if self.by_rows else Shard(-1), grad))
        p.note = table._layout if self.by_rows else None
        rows = (grad, taken, table.shape[0], -1 if padding is None else padding, by_frequency)
        return None, p.op(aten.embedding_dense_backward.default, rows, {})
