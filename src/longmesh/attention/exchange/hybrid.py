"""Hybrid: Ulysses inside a group of ranks, another exchange between the groups.

    inner 0   heads 0-3 of group 0's tokens   <- ring or sparse ->   heads 0-3 of group 1's tokens
    inner 1   heads 4-7 of group 0's tokens   <- ring or sparse ->   heads 4-7 of group 1's tokens

A group acts as one rank of the outer exchange; its members do the same with different heads, so
the outer transfers of the members never meet.
"""

import dataclasses

import numpy as np

from longmesh.attention.exchange.base import Exchange, Prices
from longmesh.attention.exchange.needs import Needs, Stretches
from longmesh.attention.exchange.sparse import Sparse
from longmesh.attention.exchange.ulysses import check_groups
from longmesh.attention.layout.base import Ownership
from longmesh.errors import LongmeshError


@dataclasses.dataclass(frozen=True)
class Hybrid(Exchange):
    """Ulysses inside groups of ranks, `outer` between them; `groups` of heads as in `Ulysses`.

    >>> plan = plan_attention(seq_len=4096, ranks=(2, 2), exchange=Hybrid(outer=Ring()))  # two hosts of two ranks
    >>> plan.inner, plan.outer
    (2, 2)
    """

    outer: Exchange = Sparse()  # noqa: RUF009 (frozen)
    groups: int | None = None
    splits_heads = True

    def __post_init__(self) -> None:
        check_groups(self.groups)
        if self.outer.splits_heads:
            raise LongmeshError(
                f"Hybrid(outer={self.outer}): the outer exchange moves keys; use Ring() or Sparse()"
            )

    @property
    def hops(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.outer.hops

    @property
    def arrival(self) -> str:
        return self.outer.arrival

    @property
    def moves_queries(self) -> bool:  # type: ignore[override]
        return self.outer.moves_queries

    def place(self, rows: np.ndarray, owned: Ownership, kv_owned: Ownership, prices: Prices) -> np.ndarray:
        return self.outer.place(rows, owned, kv_owned, prices)

    def last_stage(self, needs: Needs) -> int:
        return self.outer.last_stage(needs)

    def stretches(self, needs: Needs) -> Stretches:
        return self.outer.stretches(needs)

    def received(self, needs: Needs, rank: int) -> np.ndarray:
        return self.outer.received(needs, rank)

    def lent(self, needs: Needs, owner: int) -> np.ndarray:
        return self.outer.lent(needs, owner)

    def __str__(self) -> str:
        return f"Hybrid(outer={self.outer})"
