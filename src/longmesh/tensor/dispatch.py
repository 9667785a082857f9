"""Run an aten op on DTensors: look up its plan, move inputs that lie wrong, call the op locally, wrap.

    y = x + w  ->  key: add.Tensor, layouts, global shapes, static arguments
               ->  OpPlan (cached): which inputs move where, the local call, the outputs' layouts

A plan is made once per key: the op's rule lists what is valid on one axis, `propagate.choose` combines
the axes. An op without a rule is decomposed; failing that its inputs are replicated and a warning
names it, once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._mode_utils import no_dispatch

from longmesh.errors import LongmeshError
from longmesh.spec import Layout
from longmesh.tensor.autograd import move, settle_lookup
from longmesh.tensor.dtensor import DTensor
from longmesh.tensor.held import Held, hold
from longmesh.tensor.op_plan import OpPlan, Output, make_plan
from longmesh.tensor.tree import all_tensors, map_tensors
from longmesh.tensor.view_origin import remember_origin, write_to_origin

_make_wrapper = torch.Tensor._make_wrapper_subclass
_NUMBERS = frozenset((int, float, bool, complex))

Handler = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]


class Dispatcher:
    """The op plans made so far, the ops with a handler of their own, and the ops warned of."""

    def __init__(self) -> None:
        self.plans: dict[tuple[Any, ...], OpPlan] = {}
        self.handlers: dict[OpOverload, Handler] = {}
        self.warned: set[str] = set()

    def __call__(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        handler = self.handlers.get(func)
        if handler is None:
            return self.run(func, args, kwargs)
        result = handler(func, args, kwargs)
        if type(result) is DTensor and result._origin is not None and args and result is args[0]:
            write_to_origin(result, move)
        return result

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run by rule, decomposition or replication, without looking for a handler."""
        parts: list[Any] = [func]
        held = describe(args, parts, None)
        if kwargs:
            for name, value in kwargs.items():
                parts.append(name)
                held = describe((value,), parts, held)
        if held is None or PLAIN in parts:
            if writes_plain(func, args, kwargs):
                args, kwargs = map_tensors(value_of, (args, kwargs))
                return func(*args, **kwargs)
            args, kwargs = replicate_plain(func, args, kwargs)
            return self.run(func, args, kwargs)
        key = tuple(parts)
        try:
            plan = self.plans.get(key)
        except TypeError:  # symbolic sizes don't hash
            plan = make_plan(func, args, kwargs, held.comm)
        else:
            if plan is None:
                plan = make_plan(func, args, kwargs, held.comm)
                if SYMBOLIC not in parts:
                    self.plans[key] = plan
        if plan.local_call is None:
            return self._without_rule(plan, func, args, kwargs)
        if plan.is_plain:
            result = plan.local_call(*[a._local_tensor if type(a) is DTensor else a for a in args])
        else:
            result = _call_locally(plan, args, kwargs)
        output = plan.single
        if plan.written is not None:
            result = args[plan.written]
            if result._origin is not None:
                write_to_origin(result, move)
        elif output is not None:
            result = wrap(result, output, held.mesh)
        else:
            result = wrap_all(result, plan.outputs, held.mesh)
        if plan.is_view and (plan.is_copy or args[0]._origin is not None):
            remember_origin(result, func, args, kwargs)
        return result

    def _without_rule(
        self, plan: OpPlan, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if plan.functional is not None:
            return write_back(func, plan.functional, args, kwargs)
        if plan.decomposition is not None:
            token = _decomposing.set(True)
            try:
                return plan.decomposition(*args, **kwargs)
            finally:
                _decomposing.reset(token)
        return self.replicate(func, args, kwargs)

    def replicate(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Gather every input and run the op whole on each rank."""
        name = str(func)
        if name not in self.warned:
            self.warned.add(name)
            warnings.warn(
                f"{name} has no sharding rule: its inputs are replicated on every rank. Register one with "
                "register_sharding, or redistribute to Replicate() yourself to silence this",
                stacklevel=4,
            )
        mesh = first_mesh(args, kwargs)
        whole = Layout.replicated(mesh)

        def gather(tensor: torch.Tensor) -> torch.Tensor:
            return move(tensor, whole)._local_tensor if isinstance(tensor, DTensor) else tensor

        local_args, local_kwargs = map_tensors(gather, (args, kwargs))
        result = func(*local_args, **local_kwargs)
        return map_tensors(lambda t: DTensor(t, mesh, whole, t.shape, t.stride()), result)


_decomposing: ContextVar[bool] = ContextVar("longmesh_decomposing", default=False)

PLAIN = object()
SYMBOLIC = object()


def describe(values: tuple[Any, ...] | list[Any], parts: list[Any], held: Held | None) -> Held | None:
    """Append to `parts` what a plan depends on: how tensors are held, values of the rest. Returns the first
    tensor's `Held`."""
    for value in values:
        kind = type(value)
        if kind is DTensor:
            own = value._held
            parts.append(own)
            if own.is_symbolic:
                parts.append(SYMBOLIC)
            if held is None:
                held = own
            elif own.comm is not held.comm and own.mesh != held.mesh:
                parts.append(PLAIN)
        elif kind in _NUMBERS:
            parts.append(kind)
            parts.append(value)
        elif kind is list or kind is tuple:
            parts.append(len(value))
            held = describe(value, parts, held)
        elif kind is slice:
            parts.append(slice)
            held = describe((value.start, value.stop, value.step), parts, held)
        elif isinstance(value, torch.Tensor):
            parts.append(PLAIN)
        else:
            parts.append(value)
    return held


def _call_locally(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors: list[torch.Tensor] = []
    moves = iter(plan.inputs)

    def to_local(tensor: torch.Tensor) -> torch.Tensor:
        layout = next(moves)
        assert isinstance(tensor, DTensor)
        local = tensor._local_tensor if tensor._layout is layout else move(tensor, layout)._local_tensor
        tensors.append(local)
        return local

    local_args, local_kwargs = map_tensors(to_local, (args, kwargs))
    if plan.rewritten is not None:
        local_args, local_kwargs = plan.rewritten(tensors)
    assert plan.local_call is not None
    return plan.local_call(*local_args, **local_kwargs)


def wrap(local: torch.Tensor, output: Output, mesh: DeviceMesh) -> DTensor:
    """A DTensor around a local result. Positional and inlined: this is every op's last step."""
    dtype = local.dtype
    held = output.held
    if held is None or held.dtype is not dtype or held.mesh is not mesh:
        held = output.held = hold(mesh, output.layout, output.shape, output.stride, dtype)
    result = _make_wrapper(
        DTensor, output.shape, output.stride, 0, None, dtype, torch.strided, local.device, False, False
    )  # fmt: skip
    result._local_tensor = local
    result._held = held
    return result


def wrap_all(result: Any, outputs: tuple[Output, ...], mesh: DeviceMesh) -> Any:
    """Wrap the tensors of a result, in order; everything else is passed on."""
    following = iter(outputs)
    return map_tensors(lambda tensor: wrap(tensor, next(following), mesh), result)


def write_back(
    func: OpOverload, functional: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """An in-place or out= op whose target can't stay where it lies: compute, bring home, copy."""
    outs = [a.name for a in func._schema.arguments if a.is_out]  # `out`, or one name for each of several
    targets = [kwargs[name] for name in outs] or [args[0]]
    kwargs = {k: v for k, v in kwargs.items() if k not in outs}
    result = functional(*args, **kwargs)
    if torch.Tag.inplace_view in func.tags:
        with no_dispatch():
            func(*args, **kwargs)  # the wrapper's own sizes and strides
        target = args[0]
        target._local_tensor, target._held = result._local_tensor, result._held
        return target
    results = result if isinstance(result, (tuple, list)) else [result]
    for target, value in zip(targets, results, strict=False):
        if target.shape != value.shape:
            raise LongmeshError(
                f"{func} would give the DTensor it writes to another shape: {tuple(target.shape)} -> "
                f"{tuple(value.shape)}; use the op that returns a new tensor"
            )
        if target._lookup is not None:
            settle_lookup(target)
        target._local_tensor.copy_(move(value, target._layout)._local_tensor)
        if target._origin is not None:
            write_to_origin(target, move)
    return targets[0] if len(targets) == 1 else tuple(targets)


def first_mesh(args: Any, kwargs: Any) -> DeviceMesh:
    found: list[DeviceMesh] = []
    map_tensors(lambda t: found.append(t._mesh) if isinstance(t, DTensor) else None, (args, kwargs))
    return found[0]


def common_mesh(args: Any, kwargs: Any) -> DeviceMesh:
    """The mesh an op runs on: of its first tensor that is no scalar; of scalars only, the smallest, since what is
    equal on the ranks of a mesh is equal on a part of them."""
    tensors = [t for t in all_tensors((args, kwargs)) if isinstance(t, DTensor)]
    for tensor in tensors:
        if tensor.ndim:
            return tensor._mesh
    return min((t._mesh for t in tensors), key=lambda mesh: mesh.size())


def writes_plain(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """An in-place op on a plain tensor that only reads scalars of a mesh: a gradient times a clipping factor."""
    if not func._schema.is_mutable or not args or not isinstance(args[0], torch.Tensor):
        return False
    return not isinstance(args[0], DTensor) and not any(
        t.ndim for t in all_tensors((args, kwargs)) if isinstance(t, DTensor)
    )


def value_of(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor as it is, a DTensor whole."""
    if isinstance(tensor, DTensor):
        return move(tensor, Layout.replicated(tensor._layout.mesh))._local_tensor
    return tensor


def replicate_plain(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Take plain operands that must be equal on all ranks as replicated, and scalars of other meshes too."""
    mesh = common_mesh(args, kwargs)
    whole = Layout.replicated(mesh)

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            if tensor._mesh is mesh or tensor._mesh == mesh:
                return tensor
            if tensor.ndim:
                raise LongmeshError(
                    f"one op on tensors of two meshes: {mesh} and {tensor._mesh}; bring them onto one mesh first "
                    "(full_tensor(), then distribute_tensor())"
                )
            tensor = value_of(tensor)
        if not _is_equal_everywhere(tensor):
            shapes = ", ".join(_show(t) for t in all_tensors((args, kwargs)))
            raise LongmeshError(
                f"{func} mixes a DTensor with a plain tensor: {shapes}. Wrap the plain one with "
                "DTensor.from_local or distribute_tensor, so that its layout is known"
            )
        return DTensor(tensor, mesh, whole, tensor.shape, tensor.stride())

    return map_tensors(convert, (args, kwargs))


def _is_equal_everywhere(tensor: torch.Tensor) -> bool:
    """Scalars, also expanded ones, indices and masks; in a backward also constants: its formulas fill tensors.

    A decomposition computes from global values, so what it makes is the same on every rank.
    """
    if tensor.numel() <= 1 or not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        return True
    if _decomposing.get():
        return True
    if tensor.numel() > 1 and all(
        step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
    ):
        return True
    in_backward = torch._C._current_graph_task_id() != -1
    return in_backward and (not tensor.numel() or bool((tensor == tensor.flatten()[0]).all()))


def _show(tensor: torch.Tensor) -> str:
    if isinstance(tensor, DTensor):
        return f"DTensor{tuple(tensor.shape)} {tensor._layout}"
    return f"Tensor{tuple(tensor.shape)}"


dispatch = Dispatcher()
