"""The exchanges by their short names: one table, the lookup that explains itself, and those that `auto` compares."""

from longmesh.attention.exchange.allgather import AllGather
from longmesh.attention.exchange.auto import AutoExchange
from longmesh.attention.exchange.base import Exchange
from longmesh.attention.exchange.cheapest import Cheapest
from longmesh.attention.exchange.hybrid import Hybrid
from longmesh.attention.exchange.ring import Ring
from longmesh.attention.exchange.sparse import Sparse
from longmesh.attention.exchange.ulysses import Ulysses
from longmesh.errors import LongmeshError

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
