"""A styled layer as one step of autograd: its ops, planned together.

    forward    redistribute the input, the layer's op, redistribute the result             one plan
    backward   redistribute the gradient, the op's own backward, give the gradients back   another

The plans are made by the ops' own rules and run as those of single ops (tensor/dispatch.py). What is saved is autograd
between them: op by op, a Linear on plain tensors takes five steps of autograd each way. `run_by_ops` is the same layer
op by op: for compilers, autocast, torch.func, second derivatives, and for those who watch ops.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from longmesh._torch import functorch_level
from longmesh.comm import MeshComm, comm_anywhere, kept_by_mesh
from longmesh.comm.record import wants_ops
from longmesh.parallel.style import layout_on, note_unequal, sizes_are_asked, whole_shape
from longmesh.rules.planned import Planned
from longmesh.rules.steps import Slot
from longmesh.spec import Layout, Partial, Placement
from longmesh.spec.strides import contiguous_stride
from longmesh.tensor import DTensor
from longmesh.tensor.autograd import check_gradient, current_part, gradient_layout
from longmesh.tensor.dispatch import dispatch
from longmesh.tensor.dtensor import wrap
from longmesh.tensor.planner import Planner
from longmesh.tensor.tensor_layout import TensorLayout, tensor_layout


class FusedStep(ABC):
    """Several ops that run as one step of autograd, on a first tensor `x` and further `parameters`."""

    local_output: bool

    def entered(self, x: torch.Tensor, parameters: tuple[Any, ...]) -> DTensor:
        """The DTensor that a plain `x` is this rank's part of."""
        raise NotImplementedError(f"{type(self).__name__} takes DTensors")

    @abstractmethod
    def run_by_ops(self, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        """The same op by op, of the input, the parameters and the options."""

    @abstractmethod
    def plan_forward(
        self, p: Planner, options: tuple[Any, ...], x: Planned, *parameters: Any
    ) -> Sequence[Any]:
        """Plan the result, and what the gradient needs besides the parameters."""

    @abstractmethod
    def gradients(
        self,
        p: Planner,
        options: tuple[Any, ...],
        needs: tuple[bool, ...],
        given: Layout,
        is_plain: bool,
        grad: Planned,
        *kept: Any,
    ) -> tuple[Any, ...]:
        """Plan the gradients of an input that came laid out as `given` and of the parameters, those that are needed,
        from what `forward` gave after the result, and then the parameters."""


@dataclass(frozen=True, eq=False)
class Layer(FusedStep):
    """What a styled module does: between which layouts, and whether its result is a plain tensor. A plain input is this
    rank's part, laid out as `input_layout`."""

    mesh: DeviceMesh
    input_layout: Placement
    output_layout: Placement
    local_output: bool
    argument: str

    def __deepcopy__(self, memo: dict[int, Any]) -> Layer:
        return self

    def run(
        self, x: torch.Tensor, parameters: tuple[Any, ...], options: tuple[Any, ...] = ()
    ) -> torch.Tensor:
        """The module's forward. Collective: every rank of the mesh."""
        if can_fuse(x, self.mesh, self.input_layout, self.output_layout) and self.is_usual(
            x, parameters, options
        ):
            return run_fused(self, options, x, *parameters)
        return self.run_by_ops(x, *parameters, *options)

    def features(self, *parameters: Any) -> int | None:
        """The size of the input's last dim, where the parameters tell it."""
        return None

    def entered(self, x: torch.Tensor, parameters: tuple[Any, ...]) -> DTensor:
        comm, features = comm_anywhere(self.mesh), self.features(*parameters)
        find = _layout_of_input
        if comm.unequal_sizes or self.argument not in comm.compared:
            layout = layout_on(comm.shape, self.input_layout, x.ndim, self.argument)
            if sizes_are_asked(layout, x.shape, comm, features, self.argument):
                find = _find_layout_of_input
        described = (self.input_layout, x.shape, x.dtype, features, self.argument)
        return wrap(x.detach(), find(comm, *described))

    def plan_forward(
        self, p: Planner, options: tuple[Any, ...], x: Planned, *parameters: Any
    ) -> Sequence[Planned]:
        result, *kept = self.forward(p, options, x, *parameters)
        if self.local_output:
            note_unequal(result._tensor_layout)
        return result, *kept

    @abstractmethod
    def forward(
        self, p: Planner, options: tuple[Any, ...], x: Planned, *parameters: Any
    ) -> Sequence[Planned]:
        """As `plan_forward`; after the result comes the input as the op took it."""

    @abstractmethod
    def is_usual(self, x: torch.Tensor, parameters: tuple[Any, ...], options: tuple[Any, ...]) -> bool:
        """Whether `forward` and `backward` hold for this call."""

    @abstractmethod
    def backward(
        self,
        p: Planner,
        options: tuple[Any, ...],
        needs: tuple[bool, ...],
        grad: Planned,
        taken: Planned,
        *kept: Any,
    ) -> Sequence[Planned | None]:
        """As `gradients`, of the input as the op took it (`taken`)."""

    def on_mesh(self, placement: Placement, x: Planned) -> Layout:
        return layout_on(x._layout.mesh, placement, x.ndim, self.argument)

    def gradients(
        self,
        p: Planner,
        options: tuple[Any, ...],
        needs: tuple[bool, ...],
        given: Layout,
        is_plain: bool,
        grad: Planned,
        *kept: Any,
    ) -> tuple[Any, ...]:
        """A plain input gets a plain gradient, laid out as itself. A DTensor that came in the layout that the op takes
        gets the gradient as it is, also pending: several uses of one tensor are added before they are reduced, once.
        """
        first, *rest = self.backward(p, options, needs, grad, *kept)
        if first is not None and (is_plain or kept[0]._layout is not given):
            first = p.redistribute(first, gradient_layout(given))
        return Slot(first.slot) if first is not None and is_plain else first, *rest


def can_fuse(x: torch.Tensor, mesh: DeviceMesh, *layouts: Placement) -> bool:
    """Whether a layer may run as one step: nobody is watching the ops it would be made of, and what is pending in
    `layouts` or `x` are sums, whose terms have the gradient of the whole."""
    if isinstance(x, DTensor):
        is_known = x._mesh is mesh or x._mesh == mesh
        layouts = (*layouts, *x.placements)
    else:
        is_known = type(x) is torch.Tensor or type(x) is torch.nn.Parameter
    return (
        is_known
        and comm_anywhere(mesh).is_member
        and not any(isinstance(p, Partial) and p.reduce_op != "sum" for p in layouts)
        and not wants_ops()
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled(mesh.device_type)
        and functorch_level() is None
    )


def has_placement(parameter: Any, placement: Placement) -> bool:
    return isinstance(parameter, DTensor) and parameter.placements == (placement,)


def _find_layout_of_input(
    comm: MeshComm,
    placement: Placement,
    shape: torch.Size,
    dtype: torch.dtype,
    features: int | None,
    argument: str,
) -> TensorLayout:
    """Of a plain input, this rank's part of `shape`."""
    layout = layout_on(comm.shape, placement, len(shape), argument)
    whole = whole_shape(layout, shape, comm, features, argument)
    return tensor_layout(comm, layout, whole, contiguous_stride(whole), dtype)


_layout_of_input = kept_by_mesh(4096)(_find_layout_of_input)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, layer: FusedStep, options: tuple[Any, ...], x: torch.Tensor, *parameters: Any
    ) -> torch.Tensor:
        given = x if isinstance(x, DTensor) else layer.entered(x, parameters)
        for tensor in (given, *parameters):
            if tensor is not None:
                current_part(tensor)
        result, *kept = dispatch.run_several(layer.plan_forward, (options,), (given, *parameters))
        ctx.save_for_backward(x, *parameters, *kept)
        ctx.layer, ctx.options, ctx.num_parameters = layer, options, len(parameters)
        ctx.given, ctx.result = given._layout, result._tensor_layout
        ctx.set_materialize_grads(False)
        return result._local_tensor if layer.local_output else result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        (grad,), (_, _, *needs) = grads, ctx.needs_input_grad
        if grad is None:
            return None, None, *(None for _ in needs)
        layer, count = ctx.layer, 1 + ctx.num_parameters
        saved = ctx.saved_tensors  # asked for once: checkpoints allow no more
        inputs, kept = saved[:count], saved[count:]
        if torch.is_grad_enabled():  # a second derivative is asked for
            return None, None, *gradients_by_ops(layer.run_by_ops, inputs, needs, grad, ctx.options)
        if layer.local_output:
            own = ctx.result
            grad = wrap(grad, own.with_layout(gradient_layout(own.layout)))
        check_gradient(grad, "a parallel style")
        current_part(grad)
        static = (ctx.options, tuple(needs), ctx.given, not isinstance(inputs[0], DTensor))
        return None, None, *dispatch.run_several(layer.gradients, static, (grad, *kept, *inputs[1:]))


run_fused = _Fused.apply


def gradients_by_ops(
    run: Callable[..., torch.Tensor],
    inputs: Sequence[Any],
    needs: Sequence[bool],
    grad: torch.Tensor,
    options: tuple[Any, ...] = (),
) -> list[torch.Tensor | None]:
    """The gradients of a step that can be differentiated again: those of the same computation by ops."""
    wanted = [t for t, needed in zip(inputs, needs, strict=True) if needed]
    with torch.enable_grad():
        result = run(*inputs, *options)
        made = iter(torch.autograd.grad(result, wanted, grad, create_graph=True, allow_unused=True))
    return [next(made) if needed else None for needed in needs]
