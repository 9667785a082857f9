"""A sharded Linear.

    by columns   x R      @ weight S(0) -> y S(-1)      the gradient of x is pending
    by rows      x S(-1)  @ weight S(1) -> y P          the gradient of y is needed whole

The input is redistributed to the layout on the left and the result to the output layout; the gradients go the same ways
back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from longmesh.parallel.layer import Layer, has_placement
from longmesh.parallel.overlap import can_overlap, gather_linear
from longmesh.parallel.style import arrange, enter, leave
from longmesh.rules.planned import Planned
from longmesh.spec import Placement, Replicate, Shard
from longmesh.tensor import DTensor
from longmesh.tensor.planner import Planner

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class LinearLayer(Layer):
    """F.linear(x, weight, bias), the weight sharded `by_rows` of its transpose (its input features) or by columns.
    With `overlap` a product begins with the rows that are there."""

    by_rows: bool
    overlap: bool

    @property
    def weight_placement(self) -> Placement:
        return Shard(1 if self.by_rows else 0)

    @property
    def bias_placement(self) -> Placement:
        return Replicate() if self.by_rows else Shard(0)

    @property
    def taken_placement(self) -> Placement:
        """How the product takes its input."""
        return Shard(-1) if self.by_rows else Replicate()

    def features(self, *parameters: Any) -> int:
        return parameters[0].shape[1]

    def run_by_ops(self, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        weight, bias = arguments
        given = enter(x, self.mesh, self.input_layout, self.argument, weight.shape[1])
        result = F.linear(arrange(given, self.taken_placement), weight, bias)
        assert isinstance(result, DTensor)
        return leave(result, self.output_layout, local=self.local_output)

    def is_usual(self, x: torch.Tensor, parameters: tuple[Any, ...], options: tuple[Any, ...]) -> bool:
        weight, bias = parameters
        return (
            x.ndim > 1
            and has_placement(weight, self.weight_placement)
            and (bias is None or has_placement(bias, self.bias_placement))
        )

    def forward(
        self, p: Planner, options: tuple[Any, ...], x: Planned, *parameters: Any
    ) -> Sequence[Planned]:
        weight, bias = parameters
        layout = self.on_mesh(self.taken_placement, x)
        if self.overlap and can_overlap(x._layout, layout, x.ndim):
            taken, result = gather_linear(p, x, weight, bias, transposed=False)
        else:
            taken = p.redistribute(x, layout)
            result = p.op(aten.linear.default, (taken, weight, bias), {})
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
        weight, _ = kept
        layout = self.on_mesh(Replicate() if self.by_rows else Shard(-1), grad)
        if not (self.overlap and needs[0] and can_overlap(grad._layout, layout, grad.ndim)):
            grad = p.redistribute(grad, layout)
            return p.op(aten.linear_backward.default, (taken, grad, weight, list(needs)), {})
        grad, product = gather_linear(p, grad, weight, None, transposed=True)
        return product, *p.op(aten.linear_backward.default, (taken, grad, weight, [False, *needs[1:]]), {})[
            1:
        ]
