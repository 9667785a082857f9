"""BoundRow: one rank's plan for one batch row with row numbers as tensors, ready to gather and scatter with.

Row numbers are copied to the device once, when the route is made: a copy per call would make each call wait.

A transfer moves rows of buffers. A `Move` says which rows of my source buffer go out, in the order of
the group's members, and where each row that arrives lies in the destination. Its transpose brings
gradients home: what was `take` becomes `place` and the other way round, and counts swap.

What travels is tokens, so attention tensors become rows: a token's heads lie together in memory.

Shapes: B batch, H heads, S tokens, D head dim; a row of (B, H, D) and (B, G, E) side by side is W wide.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from longmesh.attention.mask.block import Block
from longmesh.attention.mask.slices import COLUMNS, area
from longmesh.attention.plan.attention_plan import RankPlan, RowPlan, Rows, Stage
from longmesh.attention.plan.intervals import spans

Where = Tensor | slice

# Fewer pairs than this are computed at once: less would be gained than another call of the kernel takes.
_WORTH_PARTING = 1 << 18


@dataclass(frozen=True, eq=False)
class Move:
    """`take`: rows of the source in the order they are sent. `place`: where the rows that arrive lie."""

    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    take: Where
    place: Where
    relay: bool = False
    device: torch.device | str = "cpu"

    @property
    def num_received(self) -> int:
        return sum(self.recv_counts)

    @functools.cached_property
    def place_rows(self) -> Tensor:
        """`place` as row numbers."""
        if isinstance(self.place, Tensor):
            return self.place
        return torch.arange(self.place.start, self.place.stop).to(self.device)

    @functools.cached_property
    def transposed(self) -> Move:
        return Move(self.recv_counts, self.send_counts, self.place, self.take, self.relay, self.device)


def make_move(
    sends: Sequence[Rows], receives: Sequence[Rows], places: dict[int, int], relay: bool = False,
    device: torch.device | str = "cpu",
) -> Move:  # fmt: skip
    """`sends` are rows of my source buffer; `receives`, in order, fill the destination from its first row.

    `places`: where each rank of the plan stands in the group.
    """
    out = sorted(((places[rank], start, stop) for rank, start, stop in sends), key=_place)
    into, at = [], 0
    for rank, start, stop in receives:
        into.append((places[rank], at, at + stop - start))
        at += stop - start
    into.sort(key=_place)
    n = len(places)
    where = _where(out, device), _where(into, device)
    return Move(_counts(out, n), _counts(into, n), *where, relay, device)


def _place(row: tuple[int, int, int]) -> int:
    return row[0]


def _counts(rows: list[tuple[int, int, int]], num_members: int) -> tuple[int, ...]:
    counts = [0] * num_members
    for place, start, stop in rows:
        counts[place] += stop - start
    return tuple(counts)


def _where(rows: Sequence[tuple[int, int, int]], device: torch.device | str) -> Where:
    """A slice if the rows are adjacent and in order, else their numbers."""
    rows = [row for row in rows if row[1] < row[2]]
    if not rows:
        return slice(0, 0)
    if all(before[2] == after[1] for before, after in itertools.pairwise(rows)):
        return slice(rows[0][1], rows[-1][2])
    _, start, stop = np.array(rows, dtype=np.int64).T
    return torch.from_numpy(spans(start, stop - start)).to(device)


def _where_rows(rows: np.ndarray, device: torch.device | str) -> Where:
    """The same of rows one by one."""
    if len(rows) and (np.diff(rows) == 1).all():
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows).to(device) if len(rows) else slice(0, 0)


def part(blocks: tuple[Block, ...]) -> tuple[tuple[Block, ...], tuple[Block, ...]]:
    """Most of the blocks, and the last ones to leave for later: at most half of the pairs, maybe none.

    No block is cut: the rows that are cut off a triangle take the kernel longer than it hides.
    """
    sizes = area(np.array(blocks, dtype=np.int64).reshape(-1, COLUMNS))
    if sizes.sum() < _WORTH_PARTING:
        return blocks, ()
    first = len(blocks) - int(np.searchsorted(np.cumsum(sizes[::-1]), sizes.sum() // 2, side="right"))
    return blocks[:first], blocks[first:]


class BoundRow:
    """What the driver needs of a plan for one batch row, on one rank. `members`: plan ranks in the order of
    the group that keys travel in; `peers`: those of the group that splits heads; `plan`: the rank's, if it is known."""

    def __init__(
        self, row: RowPlan, rank: int, members: Sequence[int], peers: Sequence[int],
        device: torch.device | str = "cpu", plan: RankPlan | None = None,
    ) -> None:  # fmt: skip
        self.row = row
        self.device = device
        self.plan: RankPlan = row.rank(rank) if plan is None else plan
        self.peers = tuple(peers)
        self.tokens_in_group = row.schedule.ownership.counts[self.plan.group]
        self.keys_in_group = row.schedule.kv_ownership.counts[self.plan.group]
        self._places = {rank: place for place, rank in enumerate(members)}
        self.has_remote_queries = len(row.schedule.queries) > 0
        self.keys = tuple(None if s.local else self._key_move(s) for s in self.plan.stages)
        self.home = tuple(None if s.local else self._home_move(s) for s in self.plan.stages)
        self.queries = self._move(self.plan.queries_out, self.plan.queries_in)

    @functools.cached_property
    def own_parts(self) -> tuple[tuple[Block, ...], tuple[Block, ...]]:
        """The blocks of the own keys: those to compute while the first keys of others come in, and those to compute
        while what was computed for others goes home. The second may be none."""
        own, *others = self.plan.stages
        return part(own.blocks) if own.local and others else (own.blocks, ())

    def _key_move(self, stage: Stage) -> Move:
        return self._move(stage.sends, stage.receives, stage.relay)

    def _home_move(self, stage: Stage) -> Move:
        """The way of gradients: straight to the owners, also where the keys were passed on."""
        return self._move(stage.lent, stage.kv, stage.relay).transposed

    def _move(self, sends: Sequence[Rows], receives: Sequence[Rows], relay: bool = False) -> Move:
        return make_move(sends, receives, self._places, relay, self.device)

    @functools.cached_property
    def q_positions(self) -> Tensor:
        return torch.from_numpy(self.row.group_positions(self.plan.rank)).to(self.device)

    @functools.cached_property
    def k_positions(self) -> tuple[Tensor, ...]:
        numbers = range(len(self.plan.stages))
        found = (torch.from_numpy(self.row.stage_positions(self.plan.rank, i)) for i in numbers)
        return tuple(positions.to(self.device) for positions in found)

    @functools.cached_property
    def peer_rows(self) -> tuple[Where, ...]:
        """For each peer, the rows of the group's buffers that its queries have."""
        return tuple(_where_rows(self.row.group_rows(peer), self.device) for peer in self.peers)

    @functools.cached_property
    def peer_key_rows(self) -> tuple[Where, ...]:
        """For each peer, the rows of the group's buffers that its keys have."""
        if self.row.kv_ownership is self.row.ownership:
            return self.peer_rows
        return tuple(_where_rows(self.row.kv_group_rows(peer), self.device) for peer in self.peers)


def to_rows(*tensors_BHSD: Tensor) -> Tensor:
    """(S, W): the tensors' tokens as rows, side by side. Always a copy, and only one."""
    first = tensors_BHSD[0]
    rows_SW = first.new_empty((first.shape[2], sum(width_of(t) for t in tensors_BHSD)))
    for part, tensor in zip(from_rows(rows_SW, *tensors_BHSD), tensors_BHSD, strict=True):
        part.copy_(tensor)
    return rows_SW


def width_of(tensor_BHSD: Tensor) -> int:
    return math.prod(size for dim, size in enumerate(tensor_BHSD.shape) if dim != 2)


def from_rows(rows_SW: Tensor, *like_BHSD: Tensor) -> list[Tensor]:
    """Views of the rows as tensors shaped like those given, but for the number of tokens."""
    views, at = [], 0
    for like in like_BHSD:
        B, H, _, *rest = like.shape
        part = rows_SW[:, at : at + width_of(like)].unflatten(1, (B, H, *rest))
        views.append(part.permute(1, 2, 0, *range(3, part.ndim)))
        at += width_of(like)
    return views


def take_rows(rows: Tensor, where: Where) -> Tensor:
    return rows[where] if isinstance(where, slice) else rows.index_select(0, where)


def place_rows(received: Tensor, where: Where) -> Tensor:
    """The destination that `where` fills completely."""
    if isinstance(where, slice):
        return received
    return torch.empty_like(received).index_copy_(0, where, received)


def add_rows_(total: Tensor, where: Where, rows: Tensor) -> None:
    """Adds rows where they belong; a place may occur more than once."""
    if isinstance(where, slice):
        total[where].add_(rows)
    else:
        total.index_add_(0, where, rows)
