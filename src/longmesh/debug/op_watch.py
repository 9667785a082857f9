"""Following ops on DTensors by their plans: what explain() and strict() stand on.

Every byte that an op sends is a step of its plan, known before it runs. A redistribution outside of ops was asked for
(`redistribute`, `full_tensor`) or is the gradient of one.

Which forward op a backward op belongs to: autograd numbers its nodes as the forward pass makes them. What is noted
during the forward pass, with the number of the next node, is looked up in the backward pass by the number of the
running node. No tensor gets a hook, and the graph stays as it is.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from longmesh._torch import (
    OpOverload,
    TorchDispatchMode,
    in_backward,
    next_node_number,
    node_number,
    running_node,
)
from longmesh.comm import AxisGroup, CommEvent, CommObserver, observe_comm, run_plan
from longmesh.comm.record import call_site, is_told
from longmesh.plan import Cluster, RedistributePlan
from longmesh.rules.tree import all_tensors
from longmesh.spec import Layout
from longmesh.tensor import DTensor
from longmesh.tensor.dispatch import dispatch
from longmesh.tensor.op_plan import OpPlan

__all__ = ["Makers", "Spans", "in_backward", "running_node"]

Value = TypeVar("Value")


class Spans(Generic[Value]):
    """Values that hold from one node number until the next value is noted."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._values: list[Value] = []

    def note(self, value: Value) -> None:
        """Nodes that are made from now on belong to `value`."""
        self._starts.append(next_node_number())
        self._values.append(value)

    def of_running_node(self) -> Value | None:
        node = running_node()
        if node is None:
            return None
        place = bisect_right(self._starts, node_number(node)) - 1
        return self._values[place] if place >= 0 else None


class Makers(Generic[Value]):
    """Values of the ops that made nodes: noted inside an op, found again in its backward."""

    def __init__(self) -> None:
        self._values: dict[int, Value] = {}

    def note(self, value: Value) -> None:
        """The running op, whose node (if it has one) is the last that was made, belongs to `value`."""
        self._values.setdefault(next_node_number() - 1, value)

    def of_running_node(self) -> Value | None:
        node = running_node()
        return None if node is None else self._values.get(node_number(node))


@dataclass(frozen=True, slots=True)
class Operand:
    """A DTensor that an op takes or gives."""

    shape: tuple[int, ...]
    layout: Layout
    itemsize: int
    cluster: Cluster

    @staticmethod
    def of(tensor: DTensor) -> Operand:
        own = tensor._tensor_layout
        return Operand(tuple(tensor.shape), own.layout, tensor.element_size(), own.comm.cluster)

    def __str__(self) -> str:
        return f"{self.shape} {self.layout}"


@dataclass(slots=True)
class WatchedOp:
    """An op: its operands, its plan, where it was called, and the collectives that ran inside it."""

    func: OpOverload
    inputs: tuple[Operand, ...]
    where: str
    plan: OpPlan | None
    outputs: tuple[Operand, ...] = ()
    events: list[CommEvent] = field(default_factory=list)


class OpWatch(TorchDispatchMode):
    """A mode that opens a `WatchedOp` around every op on DTensors. Subclasses say what to do with it."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._running: WatchedOp | None = None
        self._sites: Makers[str] = Makers()
        self._inside = _Inside(self)
        self._scopes: list[ExitStack] = []

    def before_op(self, op: WatchedOp) -> None:
        """An op is about to run by its plan."""

    def on_op(self, op: WatchedOp) -> None:
        """An op has run."""

    def on_explicit(self, plan: RedistributePlan, where: str) -> None:
        """A redistribution outside of ops is about to run."""

    def on_collective(self, event: CommEvent) -> None:
        """A collective that belongs to no op and no redistribution is about to start."""

    def __enter__(self) -> Any:
        self._scopes.append(ExitStack())
        if not is_told(self._inside):
            self._scopes[-1].enter_context(observe_comm(self._inside))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._scopes.pop().close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not any(issubclass(kind, DTensor) for kind in types):
            return func(*args, **kwargs)
        inputs = _parts_of((args, kwargs))
        bound = dispatch.plan_of(func, args, kwargs)
        plan = None if bound is None else bound.plan
        op = WatchedOp(func, tuple(map(Operand.of, inputs)), self.where(), plan)
        self.before_op(op)
        outer, self._running = self._running, op
        try:
            with nullcontext() if is_told(self._inside) else observe_comm(self._inside):
                result = self._run(op, args, kwargs)
        finally:
            self._running = outer
        op.outputs = tuple(map(Operand.of, _parts_of(result)))
        self.on_op(op)
        return result

    def _run(self, op: WatchedOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if op.plan is None or op.plan.is_known:
            return op.func(*args, **kwargs)
        with self:  # its ops are watched one by one
            return dispatch.from_torch(op.func, (), args, kwargs)

    def where(self) -> str:
        """The call site of what is running; in a backward pass its node and the call site of its forward, if seen."""
        if not in_backward():
            site = call_site()
            self._sites.note(site)
            return site
        node = running_node()
        name = "backward" if node is None else node.name()
        forward = self._sites.of_running_node()
        return f"{name} of {forward}" if forward else f"{name}, run from {call_site()}"


class _Inside(CommObserver):
    def __init__(self, watch: OpWatch) -> None:
        self._watch = watch

    wants_ops = True

    def on_redistribute(self, plan: RedistributePlan, local: torch.Tensor) -> None:
        if self._watch._running is None:
            self._watch.on_explicit(plan, self._watch.where())

    def on_collective(self, event: CommEvent, group: AxisGroup) -> None:
        if self._watch._running is not None:
            self._watch._running.events.append(event)
        elif not _in_redistribution():
            self._watch.on_collective(event)


def _parts_of(value: Any) -> list[DTensor]:
    return [t for t in all_tensors(value) if isinstance(t, DTensor)]


def _in_redistribution() -> bool:
    """Whether a redistribution plan is being run: `on_explicit` has said what it sends."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is run_plan.__code__:
            return True
        frame = frame.f_back
    return False
