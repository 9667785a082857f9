"""The exchanges by their short names: one table, and the lookup that explains itself."""

from longmesh.attention.exchange.allgather import AllGather
from longmesh.attention.exchange.auto import AutoExchange
from longmesh.attention.exchange.base import Exchange
from longmesh.attention.exchange.cheapest import Cheapest
from longmesh.attention.exchange.hybrid import Hybrid
from longmesh.attention.exchange.ring import Ring
from longmesh.attention.exchange.sparse import Sparse
from longmesh.attention.exchange.ulysses import Ulysses
from longmesh.errors import LongmeshError

EXCHANGES: dict[str, Exchange] = {
    "ring": Ring(),
    "allgather": AllGather(),
    "ulysses": Ulysses(),
    "sparse": Sparse(),
    "cheapest": Cheapest(),
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
