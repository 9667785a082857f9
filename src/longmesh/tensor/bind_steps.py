"""From steps to what runs them: each is bound to the process groups of its mesh once, and then called with a frame.

A plan lists what the ranks along some axes have in row-major order of their coordinates; a process group may have
another order, in which collectives take and give things.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from longmesh.comm import AxisGroup, MeshComm, run_plan
from longmesh.comm.collectives import all_gather
from longmesh.comm.halo import fetch_rows, return_rows
from longmesh.comm.intervals import exchange_intervals
from longmesh.rules.steps import (
    ApplyMask,
    Exchange,
    Execute,
    Forget,
    Gather,
    GivenCall,
    Halo,
    LocalCall,
    Recall,
    Redistribute,
    RunOps,
    Step,
    fill,
)
from longmesh.rules.tree import all_tensors, map_tensors
from longmesh.tensor.autograd import apply_lookup_mask
from longmesh.tensor.executors import executor_of
from longmesh.tensor.step_cost import OwnStep, route_of
from longmesh.tensor.tensor_layout import Reduced, version_of

Comms = Sequence[MeshComm]


@dataclass(slots=True, eq=False)
class Frame:
    """A plan while it runs: local tensors by slot, and the call that it runs for. The first slots are the call's
    tensors, in order."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[Any]
    values: list[Any]


Run = Callable[[Frame], None]


def bind_step(step: Step, comms: Comms) -> Run:
    """What runs a step. Collective where groups over several axes are made."""
    if isinstance(step, OwnStep):
        return step.bind(comms)
    return _BINDERS[type(step)](step, comms)


def _apply_mask(step: ApplyMask, comms: Comms) -> Run:
    def run(frame: Frame) -> None:
        tensor = frame.tensors[step.input]
        if tensor._lookup is not None:
            apply_lookup_mask(tensor)
        frame.values[step.input] = tensor._local_tensor

    return run


def _forget(step: Forget, comms: Comms) -> Run:
    def run(frame: Frame) -> None:
        tensor = frame.tensors[step.input]
        tensor._reduced = None
        tensor._tensor_layout = tensor._tensor_layout.remembering(None)

    return run


def _given_call(step: GivenCall, comms: Comms) -> Run:
    call, slots, out = step.call, step.slots, step.out

    def run(frame: Frame) -> None:
        parts = iter([frame.values[slot] for slot in slots])
        args, kwargs = map_tensors(lambda _: next(parts), (frame.args, frame.kwargs))
        frame.values[out] = call(*args, **kwargs)

    return run


def _local_call(step: LocalCall, comms: Comms) -> Run:
    call, given, named, out = step.call, step.args, step.kwargs, step.out

    def run(frame: Frame) -> None:
        values = frame.values
        args = fill(given, values)
        _store(values, out, step.count, call(*args, **fill(named, values)) if named else call(*args))

    return run


def _store(values: list[Any], out: int, count: int | None, result: Any) -> None:
    if count is None:
        values[out] = result
    else:
        values[out : out + count] = all_tensors(result)[:count]


def _run_ops(step: RunOps, comms: Comms) -> Run:
    def run(frame: Frame) -> None:
        frame.values[step.out] = step.run(step.func, frame.args, frame.kwargs)

    return run


def _redistribute(step: Redistribute, comms: Comms) -> Run:
    comm, source, out, number = comms[step.mesh], step.source, step.out, step.input
    plan = route_of(step, comms)

    def run(frame: Frame) -> None:
        local = frame.values[out] = run_plan(plan, frame.values[source], comm)
        if step.remembers and number is not None:
            tensor = frame.tensors[number]
            tensor._reduced = Reduced(local, version_of(tensor))
            tensor._tensor_layout = tensor._tensor_layout.remembering(step.want)

    return run


def _recall(step: Recall, comms: Comms) -> Run:
    def run(frame: Frame) -> None:
        tensor = frame.tensors[step.input]
        known, own = tensor._reduced, tensor._tensor_layout
        assert own.reduced is not None, "only what is remembered is recalled"
        if known.version != version_of(tensor):  # written to through a view
            local = run_plan(own.route(own.reduced), tensor._local_tensor, own.comm)
            known = tensor._reduced = Reduced(local, version_of(tensor))
        frame.values[step.out] = known.local

    return run


def _exchange(step: Exchange, comms: Comms) -> Run:
    group, order = _group(step, comms)
    have = tuple(step.have[place] for place in order)
    want = tuple(step.want[place] for place in order)

    def run(frame: Frame) -> None:
        pieces = [frame.values[slot] for slot in step.pieces]
        frame.values[step.out] = exchange_intervals(
            pieces, have=have, want=want, dim=step.dim, group=group, fill=step.fill
        )

    return run


def _group(step: Any, comms: Comms) -> tuple[AxisGroup, list[int]]:
    """The group of a step's axes, and the places of its members in the plan's order."""
    comm = comms[step.mesh]
    group, members = comm.group(step.axes), comm.shape.members(step.axes, comm.coordinate)
    return group, [members.index(member) for member in group.members]


def _gather(step: Gather, comms: Comms) -> Run:
    group, order = _group(step, comms)
    size = group.size
    back = None if order == sorted(order) else [order.index(place) for place in range(size)]

    def run(frame: Frame) -> None:
        local = frame.values[step.source]
        if local.numel() == 0:
            frame.values[step.out] = local.new_empty((size, *local.shape))
            return
        found = all_gather(local.contiguous().view(-1), group=group).view(size, *local.shape)
        frame.values[step.out] = found if back is None else found[back]

    return run


def _halo(step: Halo, comms: Comms) -> Run:
    group, order = _group(step, comms)
    have, need = (tuple(listed[place] for place in order) for listed in (step.have, step.need))
    carry = return_rows if step.home else fetch_rows

    def run(frame: Frame) -> None:
        frame.values[step.out] = carry(frame.values[step.source], step.dim, have, need, group)

    return run


def _execute(step: Execute, comms: Comms) -> Run:
    call = executor_of(step.name).bind(step, comms[step.mesh])

    def run(frame: Frame) -> None:
        _store(frame.values, step.out, step.count, call(*fill(step.args, frame.values)))

    return run


_BINDERS: dict[type[Step], Callable[[Any, Comms], Run]] = {
    ApplyMask: _apply_mask,
    Forget: _forget,
    GivenCall: _given_call,
    LocalCall: _local_call,
    RunOps: _run_ops,
    Redistribute: _redistribute,
    Recall: _recall,
    Exchange: _exchange,
    Gather: _gather,
    Halo: _halo,
    Execute: _execute,
}
