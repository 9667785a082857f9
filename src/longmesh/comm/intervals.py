"""Exchange intervals of one dim: from the pieces that ranks hold to the interval that each wants.

Redistribution knows layouts, whose pieces follow chunking. After a slice, a pad, a flip or a cat along a sharded
dim they don't: 10 rows over 4 ranks are 3 3 3 1, and rows 2 to 10 of them are 1 3 3 1 where chunking
wants 2 2 2 2. Every rank knows all intervals, so one all_to_all moves exactly the rows that change hands, and none
runs where nothing does.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from longmesh.comm import collectives
from longmesh.comm.groups import AxisGroup

Interval = tuple[int, int]
"""Start and length."""

Pieces = tuple[Interval, ...]


def exchange_intervals(
    pieces: Sequence[torch.Tensor],
    *,
    have: tuple[Pieces, ...],
    want: tuple[Interval, ...],
    dim: int,
    group: AxisGroup,
    fill: float | int | bool | complex = 0,
) -> torch.Tensor:
    """This rank's wanted interval, put together from all members' pieces; what none has is `fill`.

    `have[i]` and `want[i]` belong to member i of the group; `pieces` are the tensors of `have[group.rank]`, alike
    in every other dim and in dtype. Collective: every rank of the group, with the same intervals.
    """
    me = group.rank
    shape = list(pieces[0].shape)
    shape[dim] = want[me][1]
    out = pieces[0].new_full(shape, fill)
    row = math.prod(size for d, size in enumerate(shape) if d != dim)
    for piece, interval in zip(pieces, have[me], strict=True):
        _copy_overlap(out, want[me], piece, interval, dim)
    if not _travels(have, want):
        return out
    sends = [_overlaps(have[me], wanted) if q != me else [] for q, wanted in enumerate(want)]
    parts = [
        pieces[number].narrow(dim, start - have[me][number][0], length).reshape(-1)
        for spans in sends
        for number, start, length in spans
    ]
    buffer = torch.cat(parts) if parts else pieces[0].new_empty(0)
    arrivals = [_overlaps(held, want[me]) if q != me else [] for q, held in enumerate(have)]
    received = collectives.all_to_all(
        buffer,
        recv_counts=[row * sum(length for _, _, length in spans) for spans in arrivals],
        send_counts=[row * sum(length for _, _, length in spans) for spans in sends],
        group=group,
    )
    place = 0
    for spans in arrivals:
        for _, start, length in spans:
            target = out.narrow(dim, start - want[me][0], length)
            target.copy_(received[place : place + row * length].view(target.shape))
            place += row * length
    return out


@functools.lru_cache(maxsize=4096)
def _travels(have: tuple[Pieces, ...], want: tuple[Interval, ...]) -> bool:
    """Whether any row changes hands."""
    return any(
        _overlaps(held, wanted) for i, held in enumerate(have) for j, wanted in enumerate(want) if i != j
    )


def _overlaps(pieces: Pieces, wanted: Interval) -> list[tuple[int, int, int]]:
    """Number, start and length of the parts of `pieces` that lie in `wanted`."""
    found: list[tuple[int, int, int]] = []
    for number, (start, length) in enumerate(pieces):
        low, high = max(start, wanted[0]), min(start + length, wanted[0] + wanted[1])
        if low < high:
            found.append((number, low, high - low))
    return found


def _copy_overlap(
    out: torch.Tensor, wanted: Interval, piece: torch.Tensor, interval: Interval, dim: int
) -> None:
    for _, start, length in _overlaps((interval,), wanted):
        out.narrow(dim, start - wanted[0], length).copy_(piece.narrow(dim, start - interval[0], length))
