"""Chain: this rank's place in the chain of spans, and the exchange of maps along it.

    finish = start_walk(chain, transitions, updates, entering)     # own map on its way; computing goes on
    states, last = finish()                                        # those that enter this rank's chunks

A rank makes what others need of it and no more: the first of a chain no T, the last nothing at all.

Collective over the axis of the mesh: the rounds are known to every rank, and where no message travels in a round no
rank enters it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longmesh.comm import AxisGroup
from longmesh.comm.p2p import Pending, start_all_to_all
from longmesh.plan import Cluster
from longmesh.recurrent.plan import RecurrentPlan
from longmesh.recurrent.rounds import Rounds, StateMessage, choose_rounds
from longmesh.recurrent.transition import Algebra, Transitions


@dataclass(frozen=True, slots=True)
class Map:
    """S_out = T S_in + U of some ranks' spans, for one row of the plan; T may be unknown where nobody needs it."""

    transition: Tensor | None
    update: Tensor


@dataclass(frozen=True, slots=True)
class MapSizes:
    """Shapes of a row's U and T."""

    update: torch.Size
    transition: torch.Size

    def numel(self, message: StateMessage) -> int:
        return self.update.numel() + self.transition.numel() * message.with_transition


@dataclass(frozen=True, eq=False)
class Chain:
    """`group` and `members` (plan ranks in the group's order) are None where one process has the whole sequence."""

    plan: RecurrentPlan
    rank: int
    group: AxisGroup | None
    members: tuple[int, ...]
    scheme: str | None = None
    cluster: Cluster | None = None

    @functools.cached_property
    def _rounds(self) -> dict[tuple[int, int, bool], Rounds]:
        """By sizes and direction: layers call again and again with the same."""
        return {}

    def rounds(self, state_bytes: int, transition_bytes: int, *, backward: bool) -> Rounds:
        """The rounds for maps of this size, which is the same on every rank."""
        key = state_bytes, transition_bytes, backward
        if key not in self._rounds:
            how = {"backward": backward, "scheme": self.scheme, "cluster": self.cluster}
            self._rounds[key] = choose_rounds(self.plan, state_bytes, transition_bytes, **how)
        return self._rounds[key]

    def send(
        self, messages: Sequence[StateMessage], maps: dict[int, Map], sizes: MapSizes, like: Tensor
    ) -> Pending:
        """Start one round of tensors that are `like` this one in type and device."""
        assert self.group is not None, "one process has nobody to send to"
        parts: list[Tensor] = []
        send_counts, recv_counts = [0] * self.group.size, [0] * self.group.size
        for place, member in enumerate(self.members):
            for message in messages:
                count = sizes.numel(message)
                if message.source == self.rank and message.dest == member:
                    parts += _flat(maps[message.row], message)
                    send_counts[place] += count
                if message.dest == self.rank and message.source == member:
                    recv_counts[place] += count
        buffer = torch.cat(parts) if parts else like.new_empty(0)
        return start_all_to_all(buffer, send_counts=send_counts, recv_counts=recv_counts, group=self.group)

    def receive(
        self, messages: Sequence[StateMessage], buffer: Tensor, sizes: MapSizes
    ) -> list[tuple[StateMessage, Map]]:
        """What arrived in a round, in the order of the group's members."""
        found: list[tuple[StateMessage, Map]] = []
        offset = 0
        for member in self.members:
            for message in messages:
                if message.dest != self.rank or message.source != member:
                    continue
                here = buffer[offset : offset + sizes.numel(message)]
                offset += len(here)
                update, passing = here.tensor_split([sizes.update.numel()])
                transition = passing.view(sizes.transition) if message.with_transition else None
                found.append((message, Map(transition, update.view(sizes.update))))
        return found


class StateExchange:
    """One exchange along the chain, of maps whose T has this shape and whose U is like `update`: (batch, ...).

    Rows of the plan are rows of the batch. Every rank calls `start` once, then `wait`. Whether a rank `sends` its map,
    with T (`sends_transition`), and `receives` those of others is known before it makes one.
    """

    def __init__(
        self,
        chain: Chain,
        transition: tuple[int, ...],
        update: Tensor,
        algebra: Algebra,
        *,
        backward: bool = False,
    ) -> None:
        self._chain, self._algebra, self._update = chain, algebra, update
        self._num_rows = rows = len(chain.plan.starts)
        row = update[_row(0, rows)]
        self._sizes = sizes = MapSizes(row.shape, torch.Size((len(row), *transition[1:])))
        width = update.element_size()
        self._rounds = chain.rounds(
            sizes.update.numel() * width, sizes.transition.numel() * width, backward=backward
        ).rounds
        first = self._rounds[0] if self._rounds else ()
        mine = [message for message in first if message.source == chain.rank]
        self.sends = bool(mine)
        self.sends_transition = any(message.with_transition for message in mine)
        self.receives = any(message.dest == chain.rank for message in first)
        self._pending: Pending | None = None

    def start(self, transition: Tensor | None, update: Tensor | None) -> None:
        """Send this rank's map on its way: U if it sends, T if it sends that."""
        own: dict[int, Map] = {}
        if update is not None:
            for row in range(self._num_rows):
                where = _row(row, self._num_rows)
                own[row] = Map(None if transition is None else transition[where], update[where])
        if self._rounds:
            self._pending = self._chain.send(self._rounds[0], own, self._sizes, self._update)

    def wait(self) -> Tensor | None:
        """The state that enters this rank's span, (batch, ...); None where none does."""
        if self._pending is None:
            return None
        chain, sizes = self._chain, self._sizes
        folded = self._fold_first(chain.receive(self._rounds[0], self._pending.wait(), sizes))
        for messages in self._rounds[1:]:
            buffer = chain.send(messages, folded, sizes, self._update).wait()
            for message, arrived in chain.receive(messages, buffer, sizes):
                folded[message.row] = _after(folded[message.row], arrived, self._algebra)
        if not self.receives:
            return None
        out = torch.full_like(self._update, self._algebra.nothing)
        for row, found in folded.items():
            out[_row(row, self._num_rows)] = found.update
        return out

    def _fold_first(self, arrived: list[tuple[StateMessage, Map]]) -> dict[int, Map]:
        """Of each row, what its chain sent, nearest last."""
        by_place = {(message.row, message.source): found for message, found in arrived}
        folded: dict[int, Map] = {}
        distance = {source: abs(source - self._chain.rank) for _, source in by_place}
        for row, source in sorted(by_place, key=lambda key: (key[0], distance[key[1]])):
            found = by_place[row, source]
            folded[row] = _after(folded[row], found, self._algebra) if row in folded else found
        return folded


Walk = tuple[Tensor, Tensor]


def start_walk(
    chain: Chain, run: Transitions, updates: Tensor, entering: Tensor | None, *, backward: bool = False
) -> Callable[[], Walk]:
    """States of all chunks of a rank: its own map is sent; calling what is returned waits for those of others.

    That gives the states that enter the chunks and the one that leaves the last. `entering` is added to what arrives.
    """
    exchange = StateExchange(chain, run.values[0].shape, updates[0], run.algebra, backward=backward)
    if not exchange.receives:
        states, last = run.walk(updates, entering)
        exchange.start(None, last if exchange.sends else None)

        def finish_alone() -> Walk:
            exchange.wait()
            return states, last

        return finish_alone
    own = run.last(updates, entering) if exchange.sends else None
    exchange.start(run.whole() if exchange.sends_transition else None, own)

    def finish() -> Walk:
        arrived = exchange.wait()
        assert arrived is not None, "a rank that receives is told a state"
        return run.walk(updates, arrived if entering is None else run.algebra.add(arrived, entering))

    return finish


def _after(later: Map, earlier: Map, algebra: Algebra) -> Map:
    """The map of `earlier` followed by `later`."""
    assert later.transition is not None, "a map that something passes through has its T"
    transition = None
    if earlier.transition is not None:
        transition = algebra.compose(later.transition, earlier.transition)
    return Map(transition, algebra.add(algebra.apply(later.transition, earlier.update), later.update))


def _row(row: int, rows: int) -> slice:
    return slice(None) if rows == 1 else slice(row, row + 1)


def _flat(found: Map, message: StateMessage) -> list[Tensor]:
    parts = [found.update.reshape(-1)]
    if message.with_transition:
        assert found.transition is not None, "a map that something passes through has its T"
        parts.append(found.transition.reshape(-1))
    return parts
