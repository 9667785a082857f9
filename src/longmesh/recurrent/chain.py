"""Chain: this rank's place in the chain of spans, and the exchange of maps along it.

    pending = chain.start(transitions, updates)      # own (T, U) on their way; computing goes on
    state = pending.wait()                           # the state that enters this rank's span

Collective over the axis of the mesh: the rounds are known to every rank, and where no message travels in a round no
rank enters it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longmesh.comm import AxisGroup
from longmesh.comm.p2p import Pending, start_all_to_all
from longmesh.plan import Cluster
from longmesh.recurrent.plan import RecurrentPlan
from longmesh.recurrent.rounds import Message, Rounds, choose_rounds
from longmesh.recurrent.transition import Algebra


@dataclass(frozen=True, slots=True)
class Map:
    """S_out = T S_in + U of some ranks' spans, for one row of the plan; T may be unknown where nobody needs it."""

    transition: Tensor | None
    update: Tensor


@dataclass(frozen=True, eq=False)
class Chain:
    """`group` and `members` (plan ranks in the group's order) are None where one process has the whole sequence."""

    plan: RecurrentPlan
    rank: int
    group: AxisGroup | None
    members: tuple[int, ...]
    scheme: str | None = None
    cluster: Cluster | None = None

    def rounds(self, transition: Tensor, update: Tensor, *, backward: bool) -> Rounds:
        """The rounds for maps of this size, which is the same on every rank."""
        rows = len(self.plan.starts)
        state, passing = update.numel() // rows, transition.numel() // rows
        width = update.element_size()
        how = {"backward": backward, "scheme": self.scheme, "cluster": self.cluster}
        return choose_rounds(self.plan, state * width, passing * width, **how)

    def start(
        self, transition: Tensor, update: Tensor, *, algebra: Algebra, backward: bool = False
    ) -> Incoming:
        """Send this rank's map on its way. `update` is (batch, ...); rows of the plan are rows of the batch."""
        rounds = self.rounds(transition, update, backward=backward)
        rows = len(self.plan.starts)
        own = {row: Map(transition[_row(row, rows)], update[_row(row, rows)]) for row in range(rows)}
        return Incoming(self, rounds.rounds, own, algebra, update)

    def send(self, messages: Sequence[Message], maps: dict[int, Map], like: Map) -> Pending:
        """Start one round; `like` has the sizes of a row's map."""
        assert self.group is not None and like.transition is not None
        parts: list[Tensor] = []
        send_counts, recv_counts = [0] * self.group.size, [0] * self.group.size
        for place, member in enumerate(self.members):
            for message in messages:
                count = _numel(message, like)
                if message.source == self.rank and message.dest == member:
                    parts += _flat(maps[message.row], message)
                    send_counts[place] += count
                if message.dest == self.rank and message.source == member:
                    recv_counts[place] += count
        buffer = torch.cat(parts) if parts else like.update.new_empty(0)
        return start_all_to_all(buffer, send_counts=send_counts, recv_counts=recv_counts, group=self.group)

    def receive(self, messages: Sequence[Message], buffer: Tensor, like: Map) -> list[tuple[Message, Map]]:
        """What arrived in a round, in the order of the group's members."""
        assert like.transition is not None
        found: list[tuple[Message, Map]] = []
        offset = 0
        for member in self.members:
            for message in messages:
                if message.dest != self.rank or message.source != member:
                    continue
                update = buffer[offset : offset + like.update.numel()].view(like.update.shape)
                transition = None
                if message.with_transition:
                    passing = buffer[offset + like.update.numel() : offset + _numel(message, like)]
                    transition = passing.view(like.transition.shape)
                found.append((message, Map(transition, update)))
                offset += _numel(message, like)
        return found


class Incoming:
    """The exchange under way: the first round has started when this is made. `wait` is called once."""

    def __init__(
        self,
        chain: Chain,
        rounds: tuple[tuple[Message, ...], ...],
        own: dict[int, Map],
        algebra: Algebra,
        update: Tensor,
    ) -> None:
        self._chain, self._rounds, self._own = chain, rounds, own
        self._algebra, self._update = algebra, update
        self._first = chain.send(rounds[0], own, own[0]) if rounds else None

    def wait(self) -> Tensor | None:
        """The state that enters this rank's span, (batch, ...); None where no rank receives any."""
        if self._first is None:
            return None
        chain, like = self._chain, self._own[0]
        folded = self._fold_first(chain.receive(self._rounds[0], self._first.wait(), like))
        for messages in self._rounds[1:]:
            buffer = chain.send(messages, folded, like).wait()
            for message, arrived in chain.receive(messages, buffer, like):
                folded[message.row] = _after(folded[message.row], arrived, self._algebra)
        out = torch.full_like(self._update, self._algebra.nothing)
        for row, found in folded.items():
            out[_row(row, len(self._own))] = found.update
        return out

    def _fold_first(self, arrived: list[tuple[Message, Map]]) -> dict[int, Map]:
        """Of each row, what its chain sent, nearest last."""
        by_place = {(message.row, message.source): found for message, found in arrived}
        folded: dict[int, Map] = {}
        distance = {source: abs(source - self._chain.rank) for _, source in by_place}
        for row, source in sorted(by_place, key=lambda key: (key[0], distance[key[1]])):
            found = by_place[row, source]
            folded[row] = _after(folded[row], found, self._algebra) if row in folded else found
        return folded


def _after(later: Map, earlier: Map, algebra: Algebra) -> Map:
    """The map of `earlier` followed by `later`."""
    assert later.transition is not None, "a map that something passes through has its T"
    transition = None
    if earlier.transition is not None:
        transition = algebra.compose(later.transition, earlier.transition)
    return Map(transition, algebra.add(algebra.apply(later.transition, earlier.update), later.update))


def _row(row: int, rows: int) -> slice:
    return slice(None) if rows == 1 else slice(row, row + 1)


def _numel(message: Message, like: Map) -> int:
    assert like.transition is not None
    return like.update.numel() + like.transition.numel() * message.with_transition


def _flat(found: Map, message: Message) -> list[Tensor]:
    parts = [found.update.reshape(-1)]
    if message.with_transition:
        assert found.transition is not None, "a map that something passes through has its T"
        parts.append(found.transition.reshape(-1))
    return parts
