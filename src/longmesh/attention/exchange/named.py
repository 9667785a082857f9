"""The exchanges by their short names: one table, the lookup that explains itself, and those that `auto` compares."""

import dataclasses

import numpy as np

from longmesh.attention.exchange.allgather import AllGather
from longmesh.attention.exchange.base import Exchange
from longmesh.attention.exchange.cheapest import Cheapest
from longmesh.attention.exchange.hybrid import Hybrid
from longmesh.attention.exchange.needs import Needs
from longmesh.attention.exchange.ring import Ring
from longmesh.attention.exchange.sparse import Sparse
from longmesh.attention.exchange.ulysses import Ulysses
from longmesh.errors import LongmeshError


@dataclasses.dataclass(frozen=True)
class AutoExchange(Exchange):
    """The exchange that the cost model finds fastest; planning puts it in place of this.

    >>> window = masks.sliding_window(64)
    >>> print(plan_attention(seq_len=4096, ranks=4, mask=window, exchange=AutoExchange()).exchange)
    Sparse
    """

    def last_stage(self, needs: Needs) -> int:
        raise AssertionError("planning replaces AutoExchange by the exchange it chose")

    def received(self, needs: Needs, rank: int) -> np.ndarray:
        raise AssertionError("planning replaces AutoExchange by the exchange it chose")

    def lent(self, needs: Needs, owner: int) -> np.ndarray:
        raise AssertionError("planning replaces AutoExchange by the exchange it chose")


# Of exchanges that are predicted to take as long and as much memory, `auto` takes the first.
EXCHANGES: dict[str, Exchange] = {
    "sparse": Sparse(),
    "ring": Ring(),
    "ulysses": Ulysses(),
    "cheapest": Cheapest(),
    "allgather": AllGather(),
    "hybrid": Hybrid(),
    "auto": AutoExchange(),
}


def exchange_of(choice: Exchange | str) -> Exchange:
    """The exchange, or the one of that name."""
    if isinstance(choice, Exchange):
        return choice
    if choice not in EXCHANGES:
        raise LongmeshError(
            f"exchange={choice!r} is not known; use one of {', '.join(EXCHANGES)}, "
            "or a value such as exchange=Ring()"
        )
    return EXCHANGES[choice]


def auto_exchanges(inner: int, outer: int, num_heads: int, one_sequence: bool) -> list[Exchange]:
    """The exchanges that `auto` compares. Groups of `inner` ranks that split heads exchange keys as ranks do."""
    taken = [x for x in EXCHANGES.values() if x.auto_takes(outer, num_heads, one_sequence)]
    return taken if inner == 1 else [Hybrid(outer=x) for x in taken if not x.splits_heads]
