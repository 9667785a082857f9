"""Norms of a sequence that is cut over ranks: every rank normalises its own rows.

The parameters are whole on every rank; each rank's rows give a term of their gradients, which are pending sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from longmesh.parallel.layer import Layer, can_fuse, has_placement
from longmesh.parallel.style import arrange, enter, give
from longmesh.rules.planned import Planned
from longmesh.spec import Partial, Replicate
from longmesh.tensor import DTensor
from longmesh.tensor.planner import Planner

aten = torch.ops.aten


class LayerNormLayer(Layer):
    """F.layer_norm(x, normalized, weight, bias, eps) of rows that are cut along `input_layout`, as the result is.
    Collective only where the input is not."""

    def run_by_ops(self, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        *parameters, normalized, eps = arguments
        given = arrange(enter(x, self.mesh, self.input_layout, self.argument), self.input_layout)
        result = self.normalize(given, normalized, *parameters, eps)
        assert isinstance(result, DTensor)
        return give(result, local=self.local_output)

    normalize: Callable[..., torch.Tensor] = staticmethod(F.layer_norm)

    def is_usual(self, x: torch.Tensor, parameters: tuple[Any, ...], options: tuple[Any, ...]) -> bool:
        """Whether every rank can normalise its own rows: the sequence is not among what is normalised."""
        dim = self.input_layout.dim % x.ndim if x.ndim else 0  # pyright: ignore[reportAttributeAccessIssue]
        return dim < x.ndim - len(options[0]) and all(
            p is None or (has_placement(p, Replicate()) and p.dtype == x.dtype) for p in parameters
        )

    def forward(
        self, p: Planner, options: tuple[Any, ...], x: Planned, *parameters: Any
    ) -> Sequence[Planned]:
        normalized, eps = options
        taken = p.redistribute(x, self.on_mesh(self.input_layout, x))
        result, *moments = p.op(
            aten.native_layer_norm.default, (taken, list(normalized), *parameters, eps), {}
        )
        return result, taken, *moments

    def backward(
        self,
        p: Planner,
        options: tuple[Any, ...],
        needs: tuple[bool, ...],
        grad: Planned,
        taken: Planned,
        *kept: Any,
    ) -> Sequence[Planned | None]:
        mean, rstd, *parameters = kept
        grad = p.redistribute(grad, self.on_mesh(self.input_layout, grad))
        arguments = (grad, taken, list(options[0]), mean, rstd, *parameters, list(needs))
        return p.op(aten.native_layer_norm_backward.default, arguments, {})


class RMSNormLayer(LayerNormLayer):
    """F.rms_norm(x, normalized, weight, eps), on local tensors: torch has no backward for its fused kernel on CPUs."""

    normalize = staticmethod(F.rms_norm)

    def run(
        self, x: torch.Tensor, parameters: tuple[Any, ...], options: tuple[Any, ...] = ()
    ) -> torch.Tensor:
        if not (can_fuse(x, self.mesh) and self.is_usual(x, parameters, options)):
            return self.run_by_ops(x, *parameters, *options)
        (weight,), (normalized, eps) = parameters, options
        given = arrange(x, self.input_layout) if isinstance(x, DTensor) else x
        local = given.to_local() if isinstance(given, DTensor) else given
        scale = None if weight is None else weight.to_local(grad_placements=(Partial(),))
        result = F.rms_norm(local, normalized, scale, eps)
        if isinstance(given, DTensor):
            whole = DTensor.from_local(result, self.mesh, (self.input_layout,), shape=given.shape)
            return give(whole, local=self.local_output)
        return result if self.local_output else enter(result, self.mesh, self.input_layout, self.argument)
