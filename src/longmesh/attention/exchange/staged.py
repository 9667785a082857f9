"""StagedExchange: an exchange written as one table, for those who add one of their own.

It is given a row for each fragment that any rank needs and another owns, and says in which stage each arrives. That is
simple, and quadratic in the ranks where every rank needs something of every other; the exchanges that come with the
library answer for one rank at a time instead.
"""

import abc
import functools

import numpy as np

from longmesh.attention.exchange.base import Exchange, hop_of
from longmesh.attention.exchange.fragment import AT, OFFSET, OWNER, RANK, STAGE, START, STOP
from longmesh.attention.exchange.needs import Needs, Stretches, join_fragments, whole_fragments
from longmesh.attention.layout.base import Ownership
from longmesh.attention.plan.intervals import offsets_within


class StagedExchange(Exchange):
    """An exchange with one method, `stages`. Subclasses are frozen dataclasses, so that plans can be cached.

    >>> import dataclasses
    >>> from longmesh.attention.exchange.fragment import OWNER, STAGE
    >>> @dataclasses.dataclass(frozen=True)
    ... class OwnerByOwner(StagedExchange):
    ...     def stages(self, remote, owned):
    ...         fragments = remote.copy()
    ...         fragments[:, STAGE] = 1 + fragments[:, OWNER]
    ...         return fragments
    >>> plan = plan_attention(seq_len=12, ranks=3, layout="contiguous", exchange=OwnerByOwner())
    >>> [stage.kv_rows for stage in plan.rows[0].rank(2).stages]
    [4, 4, 4]
    """

    @abc.abstractmethod
    def stages(self, remote: np.ndarray, owned: Ownership) -> np.ndarray:
        """Fragments with STAGE >= 1 that cover `remote`, the fragments each rank needs of others.

        With `hops`, a fragment of stage s is part of what the rank at that distance held in stage s - 1.
        """

    def last_stage(self, needs: Needs) -> int:
        return int(_table(self, needs)[:, STAGE].max(initial=0))

    def received(self, needs: Needs, rank: int) -> np.ndarray:
        table = _table(self, needs)
        return table[table[:, RANK] == rank]

    def lent(self, needs: Needs, owner: int) -> np.ndarray:
        table = _table(self, needs)
        return table[table[:, OWNER] == owner]

    def stretches(self, needs: Needs) -> Stretches:
        return join_fragments(_table(self, needs))


@functools.lru_cache(maxsize=64)
def _table(exchange: StagedExchange, needs: Needs) -> np.ndarray:
    """Every fragment, sorted by rank, stage and coordinate, with its place in the stage's buffer. What is passed on
    keeps the order of its owner's shard: it must be one stretch."""
    out = exchange.stages(whole_fragments(needs), needs.owned)
    by = [out[:, AT]]
    if exchange.hops:
        came = hop_of(exchange.hops, out[:, RANK], out[:, STAGE], out[:, OWNER], needs.owned.num_ranks)
        by = [out[:, START], came]
    out = out[np.lexsort((*by, out[:, STAGE], out[:, RANK]))]
    group = out[:, RANK] * (out[:, STAGE].max(initial=0) + 1) + out[:, STAGE]
    out[:, OFFSET] = offsets_within(group, out[:, STOP] - out[:, START])
    return out
