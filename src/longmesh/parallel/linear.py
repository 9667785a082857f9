"""A sharded Linear as one step of autograd: gather, multiply, reduce, on local tensors.

    by columns   x R      @ weight S(0) -> y S(-1)      the gradient of x is pending
    by rows      x S(-1)  @ weight S(1) -> y P          the gradient of y is needed whole

The input is redistributed to the layout on the left and the result to the output layout, in the step itself; the
gradients go the same ways back. Of a pending sum the bias is one term, so the first rank adds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from longmesh.comm import comm_of
from longmesh.parallel.crossing import Crossing, can_fuse, deliver, gradients_by_ops, receive, take_gradient
from longmesh.parallel.overlap import can_overlap, gather_linear
from longmesh.parallel.style import arrange, enter, layout_on, leave, move_local
from longmesh.spec import Layout, MeshShape, Partial, Placement, Replicate, Shard
from longmesh.tensor import DTensor
from longmesh.tensor.autograd import current_part, gradient_layout
from longmesh.tensor.meta import contiguous_stride


@dataclass(frozen=True, eq=False)
class LinearStep:
    """What a sharded Linear does: along which dim of the weight, and between which layouts."""

    mesh: DeviceMesh
    by_rows: bool
    input_layout: Placement
    output_layout: Placement
    local_output: bool
    overlap: bool
    argument: str

    def __deepcopy__(self, memo: dict[int, Any]) -> LinearStep:
        return self

    @property
    def weight_placement(self) -> Placement:
        return Shard(1 if self.by_rows else 0)

    @property
    def bias_placement(self) -> Placement:
        return Replicate() if self.by_rows else Shard(0)

    def run(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The module's forward. Collective: every rank of the mesh."""
        if not self._is_fusable(x, weight, bias):
            return self.run_by_ops(x, weight, bias)
        return _FusedLinear.apply(x, weight, bias, self)

    def run_by_ops(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The same with DTensor ops: under a compiler, autocast, or with parameters laid out by someone else."""
        given = enter(x, self.mesh, self.input_layout, self.argument, weight.shape[1])
        wanted = Shard(-1) if self.by_rows else Replicate()
        result = F.linear(arrange(given, wanted), weight, bias)
        assert isinstance(result, DTensor)
        return leave(result, self.output_layout, local=self.local_output)

    def _is_fusable(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        return (
            can_fuse(x, self.mesh, self.input_layout, self.output_layout)
            and x.ndim > 1
            and _lies(weight, self.weight_placement)
            and (bias is None or _lies(bias, self.bias_placement))
        )


def _lies(parameter: torch.Tensor, placement: Placement) -> bool:
    return isinstance(parameter, DTensor) and parameter.placements == (placement,)


class _FusedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: DTensor, bias: DTensor | None, step: LinearStep
    ) -> torch.Tensor:
        mesh, comm = step.mesh, comm_of(step.mesh)
        sizes, ndim = MeshShape.of(mesh), x.ndim
        local, came = receive(x, mesh, step.input_layout, weight.shape[1], step.argument)
        work = layout_on(sizes, Shard(-1) if step.by_rows else Replicate(), ndim, step.argument)
        done = layout_on(sizes, Partial() if step.by_rows else Shard(-1), ndim, step.argument)
        out = layout_on(sizes, step.output_layout, ndim, step.argument)
        shape = (*came.shape[:-1], weight.shape[0])
        term = current_part(bias) if bias is not None else None
        if step.by_rows and comm.coordinate[0] != 0:
            term = None
        matrix = current_part(weight)
        if step.overlap and can_overlap(came.layout, work, ndim):
            whole, result = gather_linear(local, came.layout, came.shape, matrix, term, comm)
        else:
            whole = move_local(local, came.layout, work, came.shape, comm)
            result = F.linear(whole, matrix, term)
        ctx.save_for_backward(x, weight, bias, whole)
        ctx.step, ctx.came, ctx.out, ctx.shape, ctx.work = step, came, out, shape, work
        ctx.weight_shape = weight.shape
        return deliver(result, mesh, done, out, shape, as_local=step.local_output)

    @staticmethod
    def backward(ctx: Any, *grads_out: Any) -> tuple[Any, ...]:
        (grad,) = grads_out
        step: LinearStep = ctx.step
        x, weight, bias, whole = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is asked for
            return *gradients_by_ops(step.run_by_ops, (x, weight, bias), ctx.needs_input_grad[:3], grad), None
        came: Crossing = ctx.came
        mesh, sizes, ndim = step.mesh, came.layout.mesh, len(ctx.shape)
        matrix = weight._local_tensor
        wanted = layout_on(sizes, Replicate() if step.by_rows else Shard(-1), ndim, step.argument)
        needs = ctx.needs_input_grad
        local, product = _gradient_and_product(grad, ctx, wanted, matrix if needs[0] else None)
        grads: list[torch.Tensor | None] = [None, None, None, None]
        if product is not None:
            made = layout_on(sizes, Shard(-1) if step.by_rows else Partial(), ndim, step.argument)
            grads[0] = came.give_back(product, made, ctx.work, mesh)
        rows = local.flatten(0, -2)
        if needs[1]:
            outer = rows.t().mm(whole.flatten(0, -2))
            grads[1] = _parameter_gradient(outer, step, step.weight_placement, ctx.weight_shape)
        if needs[2]:
            grads[2] = _parameter_gradient(rows.sum(0), step, step.bias_placement, ctx.weight_shape[:1])
        return tuple(grads)


def _parameter_gradient(
    local: torch.Tensor, step: LinearStep, placement: Placement, shape: Sequence[int]
) -> DTensor:
    layout = layout_on(MeshShape.of(step.mesh), placement, len(shape), step.argument)
    return DTensor(local, step.mesh, layout, shape, contiguous_stride(shape))


def _gradient_and_product(
    grad: torch.Tensor, ctx: Any, wanted: Layout, matrix: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A result's gradient as the step needs it, and its product with the weight if that is given."""
    step, comm = ctx.step, comm_of(ctx.step.mesh)
    if isinstance(grad, DTensor):
        local, layout = current_part(grad), grad._layout
    else:
        local, layout = grad, gradient_layout(ctx.out)
    if matrix is not None and step.overlap and can_overlap(layout, wanted, len(ctx.shape)):
        return gather_linear(local, layout, ctx.shape, matrix.t(), None, comm)
    local = take_gradient(grad, ctx.out, wanted, ctx.shape, comm)
    return local, None if matrix is None else local.matmul(matrix)
