"""Norms of a sequence that is cut over ranks: every rank normalises its own rows, a LayerNorm as one step of autograd.

The parameters are whole on every rank; each rank's rows give a term of their gradients, which are pending sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from longmesh.comm import comm_of
from longmesh.parallel.crossing import can_fuse, deliver, gradients_by_ops, receive, take_gradient
from longmesh.parallel.style import arrange, enter, layout_on, move_local
from longmesh.spec import MeshShape, Partial, Replicate, Shard
from longmesh.tensor import DTensor
from longmesh.tensor.autograd import current_part
from longmesh.tensor.meta import contiguous_stride

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class NormStep:
    """Along which dim the sequence is cut, and whether the result is a plain tensor."""

    mesh: DeviceMesh
    sequence: Shard
    local_output: bool
    argument: str

    def __deepcopy__(self, memo: dict[int, Any]) -> NormStep:
        return self

    def is_local(
        self, x: torch.Tensor, normalized: tuple[int, ...], *parameters: torch.Tensor | None
    ) -> bool:
        """Whether every rank can normalise its own rows: the sequence is not among what is normalised."""
        dim = self.sequence.dim % x.ndim if x.ndim else 0
        return (
            can_fuse(x, self.mesh)
            and dim < x.ndim - len(normalized)
            and all(p is None or (_is_whole(p) and p.dtype == x.dtype) for p in parameters)
        )

    def enter(self, x: torch.Tensor) -> DTensor:
        return arrange(enter(x, self.mesh, self.sequence, self.argument), self.sequence)

    def leave(self, result: torch.Tensor) -> torch.Tensor:
        assert isinstance(result, DTensor)
        return result.to_local() if self.local_output else result


class LayerNormStep(NormStep):
    """A LayerNorm's forward. Collective only where the input is not sharded along the sequence."""

    def run(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        normalized: tuple[int, ...],
        eps: float,
    ) -> torch.Tensor:
        if self.is_local(x, normalized, weight, bias):
            return _FusedLayerNorm.apply(x, weight, bias, normalized, eps, self)
        return self.run_by_ops(x, weight, bias, normalized, eps)

    def run_by_ops(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        normalized: tuple[int, ...],
        eps: float,
    ) -> torch.Tensor:
        """The same with DTensor ops."""
        return self.leave(F.layer_norm(self.enter(x), normalized, weight, bias, eps))


class RMSNormStep(NormStep):
    """An RMSNorm's forward, on local tensors: torch has no backward for its fused kernel on CPUs."""

    def run(
        self, x: torch.Tensor, weight: torch.Tensor | None, normalized: tuple[int, ...], eps: float | None
    ) -> torch.Tensor:
        if not self.is_local(x, normalized, weight):
            return self.run_by_ops(x, weight, normalized, eps)
        given = self.enter(x) if isinstance(x, DTensor) else x
        local = given.to_local() if isinstance(given, DTensor) else given
        scale = weight.to_local(grad_placements=(Partial(),)) if isinstance(weight, DTensor) else None
        result = F.rms_norm(local, normalized, scale, eps)
        if self.local_output:
            return result
        shape = given.shape if isinstance(given, DTensor) else None
        return DTensor.from_local(result, self.mesh, (self.sequence,), shape=shape)

    def run_by_ops(
        self, x: torch.Tensor, weight: torch.Tensor | None, normalized: tuple[int, ...], eps: float | None
    ) -> torch.Tensor:
        """The same with DTensor ops."""
        return self.leave(F.rms_norm(self.enter(x), normalized, weight, eps))


def _is_whole(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, DTensor) and parameter.placements == (Replicate(),)


class _FusedLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: DTensor | None,
        bias: DTensor | None,
        normalized: tuple[int, ...],
        eps: float,
        step: LayerNormStep,
    ) -> torch.Tensor:
        mesh = step.mesh
        given, came = receive(x, mesh, step.sequence, None, step.argument)
        own_layout = layout_on(MeshShape.of(mesh), step.sequence, x.ndim, step.argument)
        local = move_local(given, came.layout, own_layout, came.shape, comm_of(mesh))
        scale = None if weight is None else current_part(weight)
        shift = None if bias is None else current_part(bias)
        out, mean, rstd = aten.native_layer_norm(local, normalized, scale, shift, eps)
        ctx.save_for_backward(x, weight, bias, local, mean, rstd)
        ctx.step, ctx.came, ctx.own_layout, ctx.normalized, ctx.eps = step, came, own_layout, normalized, eps
        return deliver(out, mesh, own_layout, own_layout, came.shape, as_local=step.local_output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        (grad,) = grads
        step: LayerNormStep = ctx.step
        x, weight, bias, local, mean, rstd = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is asked for

            def by_ops(*inputs: Any) -> torch.Tensor:
                return step.run_by_ops(inputs[0], inputs[1], inputs[2], ctx.normalized, ctx.eps)

            made = gradients_by_ops(by_ops, (x, weight, bias), ctx.needs_input_grad[:3], grad)
            return *made, None, None, None
        scale, shift = (None if p is None else p._local_tensor for p in (weight, bias))
        shape = ctx.came.shape
        mine = take_gradient(grad, ctx.own_layout, ctx.own_layout, shape, comm_of(step.mesh))
        needs = list(ctx.needs_input_grad[:3])
        dx, *terms = aten.native_layer_norm_backward(
            mine, local, ctx.normalized, mean, rstd, scale, shift, needs
        )
        pending = layout_on(ctx.own_layout.mesh, Partial(), len(ctx.normalized), step.argument)
        stride = contiguous_stride(ctx.normalized)
        parameters = [
            DTensor(t, step.mesh, pending, ctx.normalized, stride) if needed else None
            for t, needed in zip(terms, needs[1:], strict=True)
        ]
        given = ctx.came.give_back(dx, ctx.own_layout, ctx.own_layout, step.mesh) if needs[0] else None
        return given, *parameters, None, None, None
