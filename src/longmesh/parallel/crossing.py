"""How tensors come into a step of autograd and leave it: as local parts, with what is known of the whole.

x (plain, or a DTensor) --receive--> local part + Crossing --step--> local result --deliver--> plain or DTensor
gradient --take_gradient--> local part --step--> local gradient --Crossing.give_back--> gradient of x
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from longmesh._torch import functorch_level
from longmesh.comm import MeshComm, comm_anywhere, comm_of
from longmesh.comm.record import wants_ops
from longmesh.parallel.style import layout_on, move_local, whole_shape
from longmesh.spec import Layout, MeshShape, Partial, Placement
from longmesh.tensor import DTensor
from longmesh.tensor.autograd import current_part, gradient_layout, move
from longmesh.tensor.meta import contiguous_stride


def can_fuse(x: torch.Tensor, mesh: DeviceMesh, *layouts: Placement) -> bool:
    """Whether a step may work on local tensors: nobody is watching the ops it would be made of, and what is pending
    in `layouts` or `x` are sums, whose terms have the gradient of the whole."""
    if isinstance(x, DTensor):
        known = x._lookup is None and (x._mesh is mesh or x._mesh == mesh)
        layouts = (*layouts, *x.placements)
    else:
        known = type(x) is torch.Tensor or type(x) is torch.nn.Parameter
    return (
        known
        and comm_anywhere(mesh).is_member
        and not any(isinstance(p, Partial) and p.reduce_op != "sum" for p in layouts)
        and not wants_ops()
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled(mesh.device_type)
        and functorch_level() is None
    )


@dataclass(slots=True)
class Crossing:
    """An input as a step received it: its layout, and what goes back to it."""

    layout: Layout
    shape: Sequence[int]
    is_plain: bool

    def give_back(
        self, grad: torch.Tensor, layout: Layout, step_layout: Layout, mesh: DeviceMesh
    ) -> torch.Tensor:
        """The input's gradient, which is laid out as `layout` now.

        A plain tensor gets it laid out as itself. A DTensor that came in the layout that the step works on takes
        it as it is, also pending: several uses of one tensor are then added before they are reduced, once.
        """
        comm = comm_of(mesh)
        if self.is_plain:
            return move_local(grad, layout, gradient_layout(self.layout), self.shape, comm)
        if self.layout is not step_layout:
            target = gradient_layout(self.layout)
            grad, layout = move_local(grad, layout, target, self.shape, comm), target
        return DTensor(grad, mesh, layout, self.shape, contiguous_stride(self.shape))


def receive(
    x: torch.Tensor, mesh: DeviceMesh, placement: Placement, features: int | None, argument: str
) -> tuple[torch.Tensor, Crossing]:
    """This rank's part of an input, and how it came."""
    if isinstance(x, DTensor):
        return current_part(x), Crossing(x._layout, x.shape, False)
    layout = layout_on(MeshShape.of(mesh), placement, x.ndim, argument)
    shape = whole_shape(layout, x, comm_of(mesh), features, argument)
    return x, Crossing(layout, shape, True)


def deliver(
    local: torch.Tensor, mesh: DeviceMesh, src: Layout, dst: Layout, shape: Sequence[int], *, as_local: bool
) -> torch.Tensor:
    """A step's result in the layout that is wanted."""
    moved = move_local(local, src, dst, shape, comm_of(mesh))
    if as_local:
        return moved
    return DTensor(moved, mesh, dst, tuple(shape), contiguous_stride(shape))


def take_gradient(
    grad: torch.Tensor, given: Layout, wanted: Layout, shape: Sequence[int], comm: MeshComm
) -> torch.Tensor:
    """The local part of a result's gradient in the layout `wanted`; a plain one is laid out as `given`."""
    if isinstance(grad, DTensor):
        return move(grad, wanted)._local_tensor
    return move_local(grad, gradient_layout(given), wanted, shape, comm)


def gradients_by_ops(
    run: Callable[..., torch.Tensor], inputs: Sequence[Any], needs: Sequence[bool], grad: torch.Tensor
) -> list[torch.Tensor | None]:
    """The gradients of a step that can be differentiated again: those of the same computation by ops."""
    wanted = [t for t, needed in zip(inputs, needs, strict=True) if needed]
    with torch.enable_grad():
        result = run(*inputs)
        made = iter(torch.autograd.grad(result, wanted, grad, create_graph=True, allow_unused=True))
    return [next(made) if needed else None for needed in needs]
