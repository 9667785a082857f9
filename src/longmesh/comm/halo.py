"""Fetch the rows beyond a shard's borders, and send their gradients home.

    member 0 has rows [0, 3), needs [0, 4)      one all_to_all: each member gets exactly the rows
    member 1 has rows [3, 6), needs [2, 7)      that it needs and lacks, from whoever has them,
    member 2 has rows [6, 8), needs [5, 8)      next to it or further away

`have` and `need` list every member's rows of one dim (first, after last), so all members agree on what
travels. Collective over the group; where nobody lacks a row, nothing is sent, and everyone knows it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from longmesh.comm import collectives
from longmesh.comm.groups import AxisGroup

Rows = tuple[int, int]


def fetch_rows(
    local: torch.Tensor, dim: int, have: Sequence[Rows], need: Sequence[Rows], group: AxisGroup
) -> torch.Tensor:
    """The rows `need[me]` of `dim`, when this rank holds the rows `have[me]`. Collective."""
    me = group.rank
    if is_local(have, need):
        return _take(local, dim, have[me], need[me])
    sends = [_common(have[me], rows) for rows in need]
    receives = [_common(rows, need[me]) for rows in have]
    sends[me] = (0, 0)
    received = _exchange(local, dim, have[me], sends, receives, group)
    pieces = [
        _take(local, dim, have[me], _common(have[me], need[me])) if q == me else p
        for q, p in enumerate(received)
    ]
    order = sorted(range(group.size), key=lambda q: have[q])
    return torch.cat([pieces[q] for q in order], dim)


def return_rows(
    rows: torch.Tensor, dim: int, have: Sequence[Rows], need: Sequence[Rows], group: AxisGroup
) -> torch.Tensor:
    """The transpose of `fetch_rows`: what every member has for the rows `have[me]`, added up. Collective."""
    me = group.rank
    shape = list(rows.shape)
    shape[dim] = have[me][1] - have[me][0]
    out = rows.new_zeros(shape)
    own = _common(have[me], need[me])
    _take(out, dim, have[me], own).copy_(_take(rows, dim, need[me], own))
    add_rows(out, rows, dim, have, need, group)
    return out


def add_rows(
    out: torch.Tensor,
    rows: torch.Tensor,
    dim: int,
    have: Sequence[Rows],
    need: Sequence[Rows],
    group: AxisGroup,
) -> None:
    """Add to `out`, the rows `have[me]`, what other members have for them in their `rows`. Collective."""
    if is_local(have, need):
        return
    me = group.rank
    sends = [_common(theirs, need[me]) for theirs in have]
    receives = [_common(have[me], theirs) for theirs in need]
    sends[me] = (0, 0)
    for q, piece in enumerate(_exchange(rows, dim, need[me], sends, receives, group)):
        if q != me and piece.numel():
            _take(out, dim, have[me], receives[q]).add_(piece)


def is_local(have: Sequence[Rows], need: Sequence[Rows]) -> bool:
    """Whether no member lacks a row."""
    return all(a <= c and d <= b for (a, b), (c, d) in zip(have, need, strict=True) if c < d)


def _exchange(
    tensor: torch.Tensor, dim: int, rows: Rows, sends: list[Rows], receives: list[Rows], group: AxisGroup
) -> list[torch.Tensor]:
    """The received pieces by member; `rows` are those that `tensor` holds. Our own piece stays here: empty."""
    me = group.rank
    shape = list(tensor.shape)
    row_numel = math.prod(n for d, n in enumerate(shape) if d != dim)
    lengths = [b - a if q != me else 0 for q, (a, b) in enumerate(receives)]
    buffer = torch.cat([_take(tensor, dim, rows, piece).reshape(-1) for piece in sends])
    received = collectives.all_to_all(
        buffer,
        recv_counts=[n * row_numel for n in lengths],
        send_counts=[(b - a) * row_numel for a, b in sends],
        group=group,
    )
    parts = received.split([n * row_numel for n in lengths])
    return [part.view(*shape[:dim], n, *shape[dim + 1 :]) for part, n in zip(parts, lengths, strict=True)]


def _common(left: Rows, right: Rows) -> Rows:
    low, high = max(left[0], right[0]), min(left[1], right[1])
    return (low, high) if low < high else (0, 0)


def _take(tensor: torch.Tensor, dim: int, rows: Rows, wanted: Rows) -> torch.Tensor:
    """The rows `wanted` of a tensor that holds `rows`."""
    if wanted[0] >= wanted[1]:
        return tensor.narrow(dim, 0, 0)
    return tensor.narrow(dim, wanted[0] - rows[0], wanted[1] - wanted[0])
