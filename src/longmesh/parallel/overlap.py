"""A gather and the product that waits for it, at the same time: chunks are multiplied as they arrive.

    rank 0 has rows a, rank 1 rows b, rank 2 rows c
    rank 0:   send a to 1 and 2, receive c and b       a @ w, then c @ w, then b @ w

Every rank sends its chunk to every other, the next one first, and multiplies its own chunk meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn import functional as F

from longmesh.comm import MeshComm
from longmesh.comm.p2p import Pending, start_send_receive
from longmesh.spec import Layout, Replicate, Shard


def can_overlap(src: Layout, dst: Layout, ndim: int) -> bool:
    """Whether the move from `src` to `dst` gathers rows, so that a product can start with some of them."""
    placement = src.placements[0]
    return isinstance(placement, Shard) and placement.dim < ndim - 1 and dst.placements == (Replicate(),)


def gather_linear(
    local: torch.Tensor,
    src: Layout,
    shape: Sequence[int],
    matrix: torch.Tensor,
    bias: torch.Tensor | None,
    comm: MeshComm,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole input and `linear(whole, matrix, bias)`, when this rank holds the rows that `src` gives it.

    Collective over the mesh's one axis.
    """
    (dim, _), *_ = src.shard_order
    group = comm.group((0,))
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
    whole = local.new_empty(tuple(shape))
    result = local.new_empty((*shape[:-1], matrix.shape[0]))

    def multiply(member: int, chunk: torch.Tensor) -> None:
        start, length = (int(n) for n in src.interval(dim, shape[dim], group.members[member]))
        whole.narrow(dim, start, length).copy_(chunk)
        _linear_into(result.narrow(dim, start, length), chunk, matrix, bias)

    multiply(me, local)
    for source, started in pending:
        multiply(source, started.wait().view(shapes[source]))
    return whole, result


def _linear_into(out: torch.Tensor, x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> None:
    if not out.is_contiguous():
        out.copy_(F.linear(x, matrix, bias))
    elif bias is None:
        torch.mm(x.flatten(0, -2), matrix.t(), out=out.flatten(0, -2))
    else:
        torch.addmm(bias, x.flatten(0, -2), matrix.t(), out=out.flatten(0, -2))
