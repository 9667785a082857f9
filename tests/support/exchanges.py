"""Every exchange, for tests that must hold for all of them: one list. A new exchange gets a row here."""

from longmesh.attention import Cheapest, Exchange, Hybrid, Sparse, Ulysses
from longmesh.attention.exchange.named import EXCHANGES
from support.two_way_ring import TwoWayRing

# Those that move keys. The last of the sparse ones brings few tokens in several stages.
OF_KEYS: tuple[Exchange, ...] = (
    EXCHANGES["ring"],
    EXCHANGES["allgather"],
    EXCHANGES["sparse"],
    Sparse(stages_at_most=3, min_tokens=2),
    TwoWayRing(),
)
OF_HEADS: tuple[Exchange, ...] = (EXCHANGES["ulysses"], Ulysses(groups=2), Ulysses(groups=3))
OF_QUERIES: tuple[Exchange, ...] = (EXCHANGES["cheapest"], Cheapest(min_tokens=2))

ON_ONE_AXIS: tuple[Exchange, ...] = (*OF_KEYS, *OF_HEADS, EXCHANGES["auto"])
ON_TWO_AXES: tuple[Exchange, ...] = (
    Hybrid(),
    Hybrid(groups=2),
    Hybrid(outer=EXCHANGES["ring"], groups=3),
    *(Hybrid(outer=x, groups=2) for x in OF_KEYS if x.hops),
)
