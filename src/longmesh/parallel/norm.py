"""LayerNorm of a cut sequence as one step of autograd: every rank normalises its own rows.

The parameters are whole on every rank; each rank's rows give a term of their gradients, which are pending sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from longmesh.comm import comm_of
from longmesh.parallel.linear import can_fuse, deliver, receive, take_gradient
from longmesh.parallel.style import arrange, enter, layout_on, move_local
from longmesh.spec import MeshShape, Partial, Replicate, Shard
from longmesh.tensor import DTensor
from longmesh.tensor.meta import contiguous_stride

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class LayerNormStep:
    """Along which dim the sequence is cut, and whether the result is a plain tensor."""

    mesh: DeviceMesh
    sequence: Shard
    local_output: bool
    argument: str

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerNormStep:
        return self

    def run(
        self,
        x: torch.Tensor,
        normalized: tuple[int, ...],
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        """The module's forward. Collective only where the input lies otherwise than along the sequence."""
        dim = self.sequence.dim % x.ndim if x.ndim else 0
        if (
            can_fuse(x, self.mesh)
            and dim < x.ndim - len(normalized)
            and _is_whole(weight)
            and _is_whole(bias)
            and (weight is None or weight.dtype == x.dtype)
        ):
            return _FusedLayerNorm.apply(x, weight, bias, normalized, eps, self)
        return self.run_by_ops(x, normalized, weight, bias, eps)

    def run_by_ops(
        self,
        x: torch.Tensor,
        normalized: tuple[int, ...],
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        """The same with DTensor ops."""
        given = arrange(enter(x, self.mesh, self.sequence, self.argument), self.sequence)
        result = F.layer_norm(given, normalized, weight, bias, eps)
        assert isinstance(result, DTensor)
        return result.to_local() if self.local_output else result


def _is_whole(parameter: torch.Tensor | None) -> bool:
    return parameter is None or (type(parameter) is DTensor and parameter.placements == (Replicate(),))


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
        cut = layout_on(MeshShape.of(mesh), step.sequence, x.ndim, step.argument)
        local = move_local(given, came.layout, cut, came.shape, comm_of(mesh))
        scale = None if weight is None else weight._local_tensor
        shift = None if bias is None else bias._local_tensor
        out, mean, rstd = aten.native_layer_norm(local, normalized, scale, shift, eps)
        ctx.save_for_backward(local, mean, rstd, scale, shift)
        ctx.step, ctx.came, ctx.cut, ctx.normalized = step, came, cut, normalized
        return deliver(out, mesh, cut, cut, came.shape, as_local=step.local_output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,) = grads
        step: LayerNormStep = ctx.step
        local, mean, rstd, scale, shift = ctx.saved_tensors
        shape = ctx.came.shape
        mine = take_gradient(grad, ctx.cut, ctx.cut, shape, comm_of(step.mesh))
        needs = list(ctx.needs_input_grad[:3])
        dx, *terms = aten.native_layer_norm_backward(
            mine, local, ctx.normalized, mean, rstd, scale, shift, needs
        )
        pending = layout_on(ctx.cut.mesh, Partial(), len(ctx.normalized), step.argument)
        stride = contiguous_stride(ctx.normalized)
        parameters = [
            DTensor(t, step.mesh, pending, ctx.normalized, stride) if needed else None
            for t, needed in zip(terms, needs[1:], strict=True)
        ]
        given = ctx.came.give_back(dx, ctx.cut, ctx.cut, step.mesh) if needs[0] else None
        return given, *parameters, None, None, None
