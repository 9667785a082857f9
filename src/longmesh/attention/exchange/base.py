"""Exchange: a frozen value that says in which stage each needed fragment of keys arrives.

Stage 0 is a rank's own shard. The transfer of stage i + 1 is under way while stage i is computed, and
backward walks the same stages: partial key gradients go home and are summed.

Keys come straight from their owners, in one all-to-all a stage, or ranks pass on what they hold to ranks at fixed
distances, `hops`: then a stage's keys come out of a neighbour's buffer of the stage before.

    hops = (1,)       a ring: in stage s rank r holds keys of rank r - s, which rank r - 1 held in stage s - 1
    hops = (1, -1)    both ways: keys of rank r - s from rank r - 1, and of rank r + s from rank r + 1

An exchange is asked for one rank at a time, so that a plan of a thousand ranks costs a rank no more than its own part.
"""

import abc
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from longmesh.attention.exchange.needs import Needs, Stretches, join_fragments, join_stretches
from longmesh.attention.layout.base import Ownership
from longmesh.plan.cluster import Link


class Prices(NamedTuple):
    """What a token weighs that travels, in bytes: a key with its value, a query, its partial result. `link`: how long a
    collective of the ranks takes."""

    key_bytes: int
    query_bytes: int
    result_bytes: int
    link: Link

    @property
    def away_bytes(self) -> int:
        """A query that is computed away from home: there, and its result back."""
        return self.query_bytes + self.result_bytes


class Exchange(abc.ABC):
    """How keys travel. Subclasses are frozen dataclasses, so that plans can be cached.

    >>> isinstance(Ring(), Exchange), Ulysses().splits_heads
    (True, True)
    """

    hops: tuple[int, ...] = ()  # distances at which ranks pass keys on; none: keys come from their owners
    moves_queries: bool = False  # True: some queries go to the keys, by `place`
    splits_heads: bool = False  # True: an all-to-all turns sequence shards into head shards first
    groups: int | None = None  # in how many groups of heads, where they are split; None: by their size

    def auto_takes(self, ranks: int, num_heads: int, one_sequence: bool) -> bool:
        """Whether `exchange="auto"` compares it on an axis of `ranks` ranks; `one_sequence`: keys are the tokens that
        queries are."""
        return False

    def place(self, rows: np.ndarray, owned: Ownership, kv_owned: Ownership, prices: Prices) -> np.ndarray:
        """Slices with the rank that computes them behind: those of the owner of their queries, unless they travel."""
        return rows

    @property
    def transport(self) -> Literal["send", "all_to_all"]:
        """The collective that a stage's keys take."""
        return "send" if self.hops else "all_to_all"

    def num_peers(self, ranks: int) -> int:
        """How many others a rank hears from in a stage."""
        return len(self.hops) or ranks - 1

    @property
    def arrival(self) -> str:
        """How keys arrive, in words."""
        return "passed on by the previous rank" if self.hops else "received keys"

    @abc.abstractmethod
    def last_stage(self, needs: Needs) -> int:
        """The last stage in which a key arrives anywhere; 0 if none does."""

    @abc.abstractmethod
    def received(self, needs: Needs, rank: int) -> np.ndarray:
        """The fragments in a rank's buffers, by stage and offset."""

    @abc.abstractmethod
    def lent(self, needs: Needs, owner: int) -> np.ndarray:
        """The fragments of `owner`'s keys in the buffers of others, by rank, stage and offset."""

    def stretches(self, needs: Needs) -> Stretches:
        """What is in every rank's buffers."""
        ranks = range(needs.owned.num_ranks)
        return join_stretches([join_fragments(self.received(needs, rank)) for rank in ranks])

    def __str__(self) -> str:
        return type(self).__name__


def hop_of(
    hops: Sequence[int], rank: np.ndarray, stage: np.ndarray, owner: np.ndarray, ranks: int
) -> np.ndarray:
    """The hop by which each fragment came to its rank: the first of those that lead there in as many stages."""
    found = np.zeros_like(rank)
    for hop in reversed(hops):
        found[(owner + hop * stage - rank) % ranks == 0] = hop
    return found
