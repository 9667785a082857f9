"""Exchange features between ranks: from the intervals of the last dim that they hold to those that each wants.

    q_proj gives   0....5 | 6...11 | 12..17 | 18..23      a weight sharded evenly, by rows
    heads of 4     0....7 | 8...15 | 16..19 | 20..23      whole heads on a rank, balanced

Only features that change hands travel, in one all-to-all; the backward pass sends their gradients the same
ways back and adds up those of features that several ranks wanted. Where every rank holds what it wants nothing runs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from longmesh.comm import AxisGroup, collectives
from longmesh.comm.intervals import Interval
from longmesh.spec.chunking import chunk_interval

Pieces = tuple[Interval, ...]


@dataclass(frozen=True)
class FeatureExchange:
    """`held[i]` is the interval on member i before, `wanted[i]` its intervals after, one after the other.

    Held intervals don't overlap. Wanted ones may: a feature can be needed on several ranks.
    """

    held: tuple[Interval, ...]
    wanted: tuple[Pieces, ...]

    @property
    def is_identity(self) -> bool:
        return all(
            w == (h,) or (not h[1] and not _length(w)) for h, w in zip(self.held, self.wanted, strict=True)
        )

    def bytes_sent(self, rank: int, rows: int, element_size: int) -> int:
        """What a rank sends forward, or receives backward, for `rows` tokens."""
        spans = (_overlaps(self.held[rank], w) for q, w in enumerate(self.wanted) if q != rank)
        return rows * element_size * sum(length for found in spans for _, _, length in found)

    def explain(self, rows: int = 1, element_size: int = 4) -> str:
        """The intervals of every rank and the bytes it sends for `rows` tokens."""
        lines = ["rank  holds        wants                 bytes sent"]
        for rank, (held, wanted) in enumerate(zip(self.held, self.wanted, strict=True)):
            after = " ".join(_text(w) for w in wanted)
            sent = self.bytes_sent(rank, rows, element_size)
            lines.append(f"{rank:4d}  {_text(held):<11s}  {after:<20s}  {sent:10d}")
        return "\n".join(lines)


def chunks(features: int, ranks: int) -> tuple[Interval, ...]:
    """The intervals of features that a sharded weight gives: as torch.chunk."""
    found = (chunk_interval(features, ranks, rank) for rank in range(ranks))
    return tuple((int(start), int(length)) for start, length in found)


def exchange_features(x: torch.Tensor, exchange: FeatureExchange, group: AxisGroup) -> torch.Tensor:
    """This rank's wanted features of a tensor that is cut along its last dim. Collective: every rank of the group."""
    if exchange.is_identity:
        return x
    return _Exchange.apply(x, exchange, group)  # pyright: ignore[reportReturnType]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exchange: FeatureExchange, group: AxisGroup) -> torch.Tensor:
        ctx.exchange, ctx.group = exchange, group
        wanted = exchange.wanted[group.rank]
        out = x.new_empty(*x.shape[:-1], _length(wanted))
        send, receive = _routes(exchange, group.rank)
        _move(x, out, send, receive, group, add=False)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (grad,) = grads
        exchange, group = ctx.exchange, ctx.group
        out = grad.new_zeros(*grad.shape[:-1], exchange.held[group.rank][1])
        receive, send = _routes(exchange, group.rank)
        _move(grad, out, send, receive, group, add=True)
        return out, None, None


def _move(
    x: torch.Tensor,
    out: torch.Tensor,
    send: Sequence[Pieces],
    receive: Sequence[Pieces],
    group: AxisGroup,
    *,
    add: bool,
) -> None:
    """Fill `out` with what members hold: `send[i]` are local intervals of x for member i, `receive[i]` those of out."""
    me, rows = group.rank, x.shape[:-1].numel()
    for (start, length), (target, _) in zip(send[me], receive[me], strict=True):
        place, piece = out.narrow(-1, target, length), x.narrow(-1, start, length)
        place.add_(piece) if add else place.copy_(piece)
    others = [spans if i != me else () for i, spans in enumerate(send)]
    arrivals = [spans if i != me else () for i, spans in enumerate(receive)]
    parts = [x.narrow(-1, start, length).reshape(-1) for spans in others for start, length in spans]
    received = collectives.all_to_all(
        torch.cat(parts) if parts else x.new_empty(0),
        recv_counts=[rows * _length(spans) for spans in arrivals],
        send_counts=[rows * _length(spans) for spans in others],
        group=group,
    )
    begin = 0
    for spans in arrivals:
        for target, length in spans:
            place = out.narrow(-1, target, length)
            piece = received[begin : begin + rows * length].view(place.shape)
            place.add_(piece) if add else place.copy_(piece)
            begin += rows * length


@functools.lru_cache(maxsize=1024)
def _routes(exchange: FeatureExchange, me: int) -> tuple[tuple[Pieces, ...], tuple[Pieces, ...]]:
    """What this rank sends to every member and receives from it, as intervals of its own tensors, in the order in which
    the receiver wants them."""
    send = tuple(
        tuple(
            (begin - exchange.held[me][0], length)
            for begin, _, length in _overlaps(exchange.held[me], wanted)
        )
        for wanted in exchange.wanted
    )
    mine = exchange.wanted[me]
    receive = tuple(
        tuple((place, length) for _, place, length in _overlaps(held, mine)) for held in exchange.held
    )
    return send, receive


def _overlaps(held: Interval, wanted: Pieces) -> list[tuple[int, int, int]]:
    """Of the parts of `held` that are wanted: where they begin in all features, their place in what is wanted,
    and their length."""
    found: list[tuple[int, int, int]] = []
    place = 0
    for start, length in wanted:
        low, high = max(start, held[0]), min(start + length, held[0] + held[1])
        if low < high:
            found.append((low, place + low - start, high - low))
        place += length
    return found


def _length(pieces: Pieces) -> int:
    return sum(length for _, length in pieces)


def _text(interval: Interval) -> str:
    return f"{interval[0]}:{interval[0] + interval[1]}"
