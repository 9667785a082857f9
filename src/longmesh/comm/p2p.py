"""Transfers of rows that are started now and waited for later, so that ranks compute meanwhile.

    pending = start_all_to_all(rows, send_counts=[0, 3], recv_counts=[0, 5], group=group)
    ...                                    # compute
    received = pending.wait()              # (5, width), from member 0 first

A row is what is counted; its width is the same for all. `Pending` keeps the sent buffer alive until the
transfer has ended, which the backends do not. Element types that gloo does not know travel as bytes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from longmesh.comm import collectives
from longmesh.comm.collectives import note
from longmesh.comm.groups import AxisGroup, MeshComm, kept_by_mesh
from longmesh.comm.lost import reporting
from longmesh.comm.record import CommEvent, tell_done


@dataclass(slots=True)
class Pending:
    """A transfer under way. `wait` returns what arrived; every transfer must be waited for once."""

    received: Tensor
    kind: str
    group: AxisGroup
    works: list[dist.Work] = field(default_factory=list)
    sent: Tensor | None = None
    event: CommEvent | None = None

    def wait(self) -> Tensor:
        start = time.perf_counter()
        with reporting(self.kind, self.received, self.group):
            for work in self.works:
                work.wait()
        if self.event is not None:
            tell_done(self.event, (time.perf_counter() - start) * 1e6)
        self.works, self.sent, self.event = [], None, None
        return self.received


def start_all_to_all(
    rows: Tensor, *, send_counts: Sequence[int], recv_counts: Sequence[int], group: AxisGroup
) -> Pending:
    """Start sending `send_counts[i]` rows to member i and receiving `recv_counts[i]` from it.

    Collective: every rank of the group calls it, with counts that agree, in the same order.
    `rows` must not change before `wait`.
    """
    rows = rows.contiguous()
    sent = (sum(send_counts) - send_counts[group.rank]) * _width(rows)
    event = note("all_to_all", rows, sent, group, send_counts, recv_counts)
    received = rows.new_empty((sum(recv_counts), *rows.shape[1:]))
    if group.size == 1:
        received.copy_(rows)
        return Pending(received, "all_to_all", group, event=event)
    if _width(rows) == 0:  # known to every rank: widths agree
        return Pending(received, "all_to_all", group, event=event)
    work = dist.all_to_all_single(
        _wire(received),
        _wire(rows),
        output_split_sizes=list(recv_counts),
        input_split_sizes=list(send_counts),
        group=group.process_group,
        async_op=True,
    )
    assert work is not None
    return Pending(received, "all_to_all", group, [work], rows, event)


def start_send_receive(
    rows: Tensor, *, send_counts: Sequence[int], recv_counts: Sequence[int], group: AxisGroup
) -> Pending:
    """The same contract by point-to-point messages, none of them empty: for rings, where most counts are 0.

    Called by the ranks that send or receive; a rank with nothing to do may skip it.
    """
    rows = rows.contiguous()
    sent = (sum(send_counts) - send_counts[group.rank]) * _width(rows)
    event = note("send_receive", rows, sent, group, send_counts, recv_counts)
    received = rows.new_empty((sum(recv_counts), *rows.shape[1:]))
    operations: list[dist.P2POp] = []
    for call, buffer, counts in ((dist.isend, rows, send_counts), (dist.irecv, received, recv_counts)):
        for peer, part in zip(group.global_ranks, _wire(buffer).split(list(counts)), strict=True):
            if part.numel():
                operations.append(dist.P2POp(call, part, peer, group=group.process_group))
    works = dist.batch_isend_irecv(operations) if operations else []
    return Pending(received, "send_receive", group, list(works), rows, event)


@kept_by_mesh(8)
def warm_up(comm: MeshComm, axes: tuple[int, ...]) -> None:
    """One small collective in the group over `axes`, once: NCCL may hang in a group whose first call is a message.

    Collective over the mesh.
    """
    group = comm.group(axes)
    if group.size > 1 and not group.is_gloo:
        collectives.all_reduce(torch.zeros(1, device=comm.mesh.device_type), reduce_op="sum", group=group)


def _width(rows: Tensor) -> int:
    return rows[:1].numel() if rows.shape[0] else rows.new_empty((1, *rows.shape[1:]), device="meta").numel()


def _wire(rows: Tensor) -> Tensor:
    """The rows as the backend takes them: two dims, of an element type that it knows."""
    flat = rows.reshape(rows.shape[0], -1) if rows.numel() else rows.new_empty((rows.shape[0], _width(rows)))
    return flat if flat.dtype in (torch.float32, torch.float64) else flat.view(torch.uint8)
