"""CutTokens: the tokens of one side of attention, queries or keys, as one rank of the mesh holds them.

shard     a whole tensor -> this rank's tokens, in the order of the layout      local
unshard   every rank's tokens -> the whole tensor, in the order of the sequence collective
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longmesh.attention.engine.check import Gathered, check_tokens
from longmesh.attention.execute.function import GatherTokens
from longmesh.attention.layout.base import Ownership
from longmesh.comm import AxisGroup

Group = Callable[[], tuple[AxisGroup, tuple[int, ...]]]


class CutTokens:
    """`name` is that of its `shard` in errors; `group` gives the group of all ranks, and its members as ranks of the
    plan."""

    def __init__(self, name: str, owned: Sequence[Ownership], rank: int, group: Group) -> None:
        self.name = name
        self.rank = rank
        first = owned[0]
        alike = all((o.pieces, o.stride) == (first.pieces, first.stride) for o in owned)
        self.cuts = (
            [first] if alike else list(owned)
        )  # one if every batch row is cut alike, else one for each
        self._group = group
        self._positions: dict[torch.device, Tensor] = {}
        self._orders: dict[tuple[torch.device, int], tuple[Tensor, Tensor]] = {}

    @property
    def length(self) -> int:
        """Tokens of all ranks."""
        return self.cuts[0].seq_len

    @property
    def num_tokens(self) -> int:
        """Tokens of this rank."""
        return self.cuts[0].counts[self.rank]

    @functools.cached_property
    def positions(self) -> Tensor:
        """Numbers of this rank's tokens, in local order; (batch, tokens) if rows are cut differently."""
        rows = [torch.from_numpy(row.positions(self.rank)) for row in self.cuts]
        return rows[0] if len(rows) == 1 else torch.stack(rows)

    def shard(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's part of a whole tensor. Local."""
        dim = check_tokens(self.name, tensor, dim, self.length, len(self.cuts))
        positions = self._positions_on(tensor.device)
        if len(self.cuts) == 1:
            return tensor.index_select(dim, positions)
        rows = zip(tensor.unbind(0), positions, strict=True)
        return torch.stack([row.index_select(dim - 1, where) for row, where in rows])

    def check_part(self, plan: str, tensor: Tensor, dim: int) -> Gathered:
        """What all ranks must pass the same to `unshard`, if this rank's tensor is valid."""
        dim = check_tokens("un" + self.name, tensor, dim, self.num_tokens, len(self.cuts))
        others = tuple(size for d, size in enumerate(tensor.shape) if d != dim)
        return Gathered("un" + self.name, plan, dim, others, tensor.dtype)

    def unshard(self, tensor: Tensor, dim: int) -> Tensor:
        """The whole tensor from every rank's part, which were checked. Collective."""
        if len(self.cuts) == 1:
            return self._gather(tensor.movedim(dim, 0), 0).movedim(0, dim)
        rows = [self._gather(row.movedim(dim - 1, 0), i) for i, row in enumerate(tensor.unbind(0))]
        return torch.stack([row.movedim(0, dim - 1) for row in rows])

    def _gather(self, rows: Tensor, number: int) -> Tensor:
        owned = self.cuts[number]
        order_S, mine = self._order_on(rows.device, number)
        if owned.num_ranks == 1:
            return rows.index_select(0, order_S)
        return GatherTokens.apply(rows, owned.counts, order_S, mine, self._group()[0])

    def _positions_on(self, device: torch.device) -> Tensor:
        """The positions on a device, copied there once."""
        if device not in self._positions:
            self._positions[device] = self.positions.to(device)
        return self._positions[device]

    def _order_on(self, device: torch.device, number: int) -> tuple[Tensor, Tensor]:
        """Where each token of the sequence lies in what every rank gathers, and which tokens are this rank's."""
        if (device, number) not in self._orders:
            self._orders[device, number] = self._order(device, number)
        return self._orders[device, number]

    def _order(self, device: torch.device, number: int) -> tuple[Tensor, Tensor]:
        owned = self.cuts[number]
        members = (self.rank,) if owned.num_ranks == 1 else self._group()[1]
        most = max(owned.counts)
        order = np.empty(owned.seq_len, dtype=np.int64)
        for place, member in enumerate(members):
            order[owned.positions(member)] = place * most + np.arange(owned.counts[member])
        return torch.from_numpy(order).to(device), torch.from_numpy(owned.positions(self.rank)).to(device)


class CutQueries(torch.autograd.Function):
    """This rank's part of queries (B, H, tokens, D) that every rank has. The backward gathers their gradient: it is
    collective, and every rank gets the whole of it."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, queries: CutTokens) -> Tensor:
        ctx.queries = queries
        return queries.shard(q, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.queries.unshard(gradients[0].contiguous(), 2), None
