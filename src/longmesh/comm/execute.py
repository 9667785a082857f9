"""Run a redistribution plan on this rank's local tensor.

Collective: every rank of the mesh calls `run_plan` with the same plan. What a step puts on the wire
is what the plan says: ranks exchange exactly the boxes that change hands, with uneven counts.
"""

from __future__ import annotations

import functools
import math

import torch

from longmesh._torch import AsyncCollectiveTensor
from longmesh.comm import collectives
from longmesh.comm.groups import AxisGroup, MeshComm
from longmesh.comm.local import make_terms
from longmesh.comm.record import is_recording, tell_redistribute
from longmesh.comm.transfer import Transfer, make_transfer
from longmesh.plan import RedistributePlan, Step
from longmesh.spec import Partial

cached_transfer = functools.lru_cache(maxsize=16384)(make_transfer)


def run_plan(
    plan: RedistributePlan, local: torch.Tensor, comm: MeshComm, *, async_op: bool = False
) -> torch.Tensor:
    """This rank's tensor after the plan. With `async_op` the last collective may still be under way:
    the result waits for it when first used. On a rank outside of the mesh nothing happens."""
    if not comm.is_member:
        return local
    if is_recording():
        tell_redistribute(plan, local)
    last = len(plan.steps) - 1
    for number, step in enumerate(plan.steps):
        local = run_step(step, plan.shape, local, comm, async_op=async_op and number == last)
    return local


def run_step(
    step: Step, shape: tuple[int, ...], local: torch.Tensor, comm: MeshComm, *, async_op: bool = False
) -> torch.Tensor:
    """One step. Local steps copy, so the result never shares memory with what it came from."""
    if step.kind == "pad":
        return make_terms(step, shape, local, comm.coordinate)
    if step.is_local:
        transfer = cached_transfer(step, shape, comm.coordinate, (comm.coordinate,))
        kept = transfer.sends[0]
        # A shard without elements may have to change its shape all the same.
        return (
            local[kept.slices].clone()
            if kept.numel or not local.ndim
            else local.new_empty(transfer.out_shape)
        )
    group = comm.group(step.axes)
    if step.kind == "all_reduce":
        return _all_reduce(step, local, group, async_op)
    transfer = cached_transfer(step, shape, comm.coordinate, group.members)
    if step.kind == "all_gather" and transfer.is_uniform:
        return _all_gather(transfer, local, group, async_op)
    if step.kind == "reduce_scatter":
        return _reduce_scatter(step, transfer, local, group)
    return _exchange(step, transfer, local, group)


def _all_reduce(step: Step, local: torch.Tensor, group: AxisGroup, async_op: bool) -> torch.Tensor:
    reduce_op = wire_op(step)
    divisor = average_divisor(step)
    pending = async_op and divisor == 1 and collectives.can_reduce(local.dtype, reduce_op)
    out = collectives.all_reduce(local, reduce_op=reduce_op, group=group, wait=not pending)
    return AsyncCollectiveTensor(out) if pending else divide(out, divisor)


def _all_gather(transfer: Transfer, local: torch.Tensor, group: AxisGroup, async_op: bool) -> torch.Tensor:
    pending = async_op and transfer.is_in_order and local.ndim > 0
    if pending:
        return AsyncCollectiveTensor(collectives.all_gather(local.contiguous(), group=group, wait=False))
    whole = collectives.all_gather(local.contiguous().view(-1), group=group)
    return _assemble(transfer, whole, transfer.receive_counts, local, group, own_on_wire=True)


def _exchange(step: Step, transfer: Transfer, local: torch.Tensor, group: AxisGroup) -> torch.Tensor:
    send_counts, receive_counts = transfer.send_counts, transfer.receive_counts
    send_counts[group.rank] = receive_counts[group.rank] = 0
    buffer = _pack(transfer, local, skip=group.rank)
    counts = {"recv_counts": receive_counts, "send_counts": send_counts}
    received = collectives.all_to_all(buffer, **counts, group=group, carries_out=step.kind)
    return _assemble(transfer, received, receive_counts, local, group, own_on_wire=False)


def _reduce_scatter(step: Step, transfer: Transfer, local: torch.Tensor, group: AxisGroup) -> torch.Tensor:
    reduce_op, divisor = wire_op(step), average_divisor(step)
    counts = transfer.send_counts
    mine = counts[group.rank]
    if not group.is_gloo and len(frozenset(counts)) == 1 and collectives.can_reduce(local.dtype, reduce_op):
        part = collectives.reduce_scatter(_pack(transfer, local), reduce_op=reduce_op, group=group)
    else:
        rows = collectives.all_to_all(
            _pack(transfer, local),
            recv_counts=[mine] * group.size,
            send_counts=counts,
            group=group,
            carries_out=step.kind,
        )
        part = collectives.reduce_rows(rows.view(group.size, mine), reduce_op)
    return divide(part, divisor).view(transfer.out_shape)


def _pack(transfer: Transfer, local: torch.Tensor, skip: int | None = None) -> torch.Tensor:
    parts = [
        local[part.slices].reshape(-1)
        for member, part in enumerate(transfer.sends)
        if part.numel and member != skip
    ]
    if len(parts) == 1:
        return parts[0].contiguous()
    return torch.cat(parts) if parts else local.new_empty(0)


def _assemble(
    transfer: Transfer,
    received: torch.Tensor,
    counts: list[int],
    local: torch.Tensor,
    group: AxisGroup,
    *,
    own_on_wire: bool,
) -> torch.Tensor:
    """Put each member's part where it belongs; ours comes from `local` unless it travelled too."""
    if own_on_wire and transfer.is_in_order:
        return received.view(transfer.out_shape)
    out = local.new_empty(transfer.out_shape)
    for part, piece in zip(transfer.receives, received.split(counts), strict=True):
        if piece.numel():
            out[part.slices] = piece.view(part.shape)
    kept = transfer.receives[group.rank]
    if not own_on_wire and kept.numel:
        out[kept.slices] = local[transfer.sends[group.rank].slices]
    return out


def wire_op(step: Step) -> str:
    """What the wire reduces by: an average is a sum, divided afterwards."""
    placement = step.src.placements[step.axes[0]]
    assert isinstance(placement, Partial)
    return "sum" if placement.reduce_op == "avg" else placement.reduce_op


def average_divisor(step: Step) -> int:
    """The number of ranks over which this step averages."""
    averaged = (a for a in step.axes if step.src.placements[a] == Partial("avg"))
    return math.prod(step.src.mesh.sizes[a] for a in averaged)


def divide(tensor: torch.Tensor, divisor: int) -> torch.Tensor:
    if divisor == 1:
        return tensor
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return tensor / divisor
    return torch.div(tensor, divisor, rounding_mode="trunc")
