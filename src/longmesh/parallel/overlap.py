"""A gather and the product that waits for it, at the same time: chunks are multiplied as they arrive.

    rank 0 has rows a, rank 1 rows b, rank 2 rows c
    rank 0:   send a to 1 and 2, receive c and b       a @ w, then c @ w, then b @ w

Every rank sends its chunk to every other, the next one first, and multiplies its own chunk meanwhile.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from longmesh.comm import AxisGroup
from longmesh.comm.p2p import Pending, start_send_receive
from longmesh.rules.planned import Planned
from longmesh.rules.steps import Slot
from longmesh.spec import Coordinate, Layout, Replicate, Shard
from longmesh.tensor.bind_steps import Comms, Frame, Run
from longmesh.tensor.planner import Planner
from longmesh.tensor.step_cost import OwnStep


def can_overlap(src: Layout, dst: Layout, ndim: int) -> bool:
    """Whether the move from `src` to `dst` gathers rows, so that a product can start with some of them."""
    placement = src.placements[0]
    return isinstance(placement, Shard) and placement.dim < ndim - 1 and dst.placements == (Replicate(),)


def gather_linear(
    p: Planner, x: Planned, matrix: Planned, bias: Planned | None, *, transposed: bool
) -> tuple[Planned, Planned]:
    """Plan the whole of `x`, which is sharded by rows, and its product with this rank's part of a matrix."""
    features = matrix.shape[1 if transposed else 0]
    shape, whole = (*x.shape[:-1], features), Layout.replicated(x._layout.mesh)
    done = whole.with_placement(0, Shard(x.ndim - 1))
    slot = p.new_slot(2)
    inputs = (x.slot, matrix.slot, None if bias is None else bias.slot)
    p.steps.append(GatherLinear(*inputs, slot, x._layout, tuple(x.shape), x.dtype, transposed))
    return p.wrap(Slot(slot), x, layout=whole), p.wrap(Slot(slot + 1), x, layout=done, shape=shape)


@dataclass(frozen=True, slots=True)
class GatherLinear(OwnStep):
    """The rows of a tensor of `shape`, laid out as `have`, come from all ranks, and each chunk is multiplied when it is
    there. The whole goes to the slot `out`, the product to the next."""

    source: int
    matrix: int
    bias: int | None
    out: int
    have: Layout
    shape: tuple[int, ...]
    dtype: torch.dtype
    transposed: bool

    @property
    def reads(self) -> Sequence[int]:
        return [self.source, self.matrix] + ([] if self.bias is None else [self.bias])

    def sent(self, where: Coordinate) -> list[tuple[tuple[int, ...], int]]:
        part = math.prod(map(int, self.have.local_shape(self.shape, where)))
        return [((0,), part * self.dtype.itemsize * (self.have.mesh.size() - 1))]

    def bind(self, comms: Comms) -> Run:
        """Collective over the mesh's one axis."""
        return functools.partial(_run, self, comms[0].group((0,)))

    def __str__(self) -> str:
        return "rows are gathered, and multiplied as they arrive"


def _run(step: GatherLinear, group: AxisGroup, frame: Frame) -> None:
    local, matrix = frame.values[step.source], frame.values[step.matrix]
    matrix = matrix.t() if step.transposed else matrix
    bias = None if step.bias is None else frame.values[step.bias]
    src, shape = step.have, step.shape
    (dim, _), *_ = src.shard_order
    me, size = group.rank, group.size
    shapes = [src.local_shape(shape, member) for member in group.members]
    counts = [math.prod(int(n) for n in s) for s in shapes]
    mine = local.contiguous().view(-1, 1)
    pending: list[tuple[int, Pending]] = []
    for distance in range(1, size):
        to, source = (me + distance) % size, (me - distance) % size
        started = start_send_receive(
            mine,
            send_counts=[counts[me] if i == to else 0 for i in range(size)],
            recv_counts=[counts[source] if i == source else 0 for i in range(size)],
            group=group,
        )
        pending.append((source, started))
    whole = local.new_empty(shape)
    result = local.new_empty((*shape[:-1], matrix.shape[0]))

    def multiply(member: int, chunk: torch.Tensor) -> None:
        start, length = (int(n) for n in src.interval(dim, shape[dim], group.members[member]))
        whole.narrow(dim, start, length).copy_(chunk)
        _linear_into(result.narrow(dim, start, length), chunk, matrix, bias)

    multiply(me, local)
    for source, started in pending:
        multiply(source, started.wait().view(shapes[source]))
    frame.values[step.out : step.out + 2] = [whole, result]


def _linear_into(out: torch.Tensor, x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> None:
    if not out.is_contiguous():
        out.copy_(F.linear(x, matrix, bias))
    elif bias is None:
        torch.mm(x.flatten(0, -2), matrix.t(), out=out.flatten(0, -2))
    else:
        torch.addmm(bias, x.flatten(0, -2), matrix.t(), out=out.flatten(0, -2))
