"""Ring: shards go round; in stage s rank r holds what rank r - s owns, received from rank r - 1.

    stage   rank 0   rank 1   rank 2        three shards in memory whatever the number of ranks: its own,
      0       0        1        2           the one it computes on, the one that arrives.
      1       2        0        1
      2       1        2        0

A shard shrinks on its way to the stretch that the ranks still before it need, and stops where
nobody does; so a window sends only edges. What is passed on must be one stretch of the buffer, so a buffer keeps the
order of the shard.

What a rank holds of all the shards is found without looking at pairs of ranks: each key gets the number of the first
rank, counted from this one on, that needs it, and a shard is held as far as that number is short of its owner.
"""

import dataclasses

import numpy as np

from longmesh.attention.exchange.base import Exchange
from longmesh.attention.exchange.fragment import AT, OFFSET, OWNER, RANK, STAGE, START, STOP
from longmesh.attention.exchange.needs import Needs
from longmesh.attention.layout.base import Ownership
from longmesh.attention.mask.slices import overlaps
from longmesh.attention.plan.intervals import least_over, offsets_within

Array = np.ndarray
FAR = np.iinfo(np.int64).max
PAIRS_AT_A_TIME = 1 << 18


@dataclasses.dataclass(frozen=True)
class Ring(Exchange):
    """Shards go from rank to rank, each as far as somebody still needs it.

    >>> plan = plan_attention(seq_len=4096, ranks=4, layout="zigzag", exchange=Ring())
    >>> [stage.kv_rows for stage in plan.rows[0].rank(3).stages]
    [1024, 1024, 1024, 512]
    """

    hops = (1,)

    def auto_takes(self, ranks: int, num_heads: int, one_sequence: bool) -> bool:
        return True

    def last_stage(self, needs: Needs) -> int:
        """The longest way from an owner to a rank that needs its keys."""
        n, table = needs.owned.num_ranks, needs.owned.table
        first = np.searchsorted(table[:, 1], needs.start, side="right")
        count = np.searchsorted(table[:, 0], needs.stop, side="left") - first
        longest, done = 0, 0
        before = np.cumsum(count) - count
        while done < len(count) and longest < n - 1:
            stop = max(done + 1, int(np.searchsorted(before, before[done] + PAIRS_AT_A_TIME)))
            a = np.repeat(np.arange(done, stop), count[done:stop])
            piece = first[a] + np.arange(len(a)) - (before[a] - before[done])
            longest = max(longest, int(((needs.rank[a] - table[piece, 2]) % n).max(initial=0)))
            done = stop
        return longest

    def received(self, needs: Needs, rank: int) -> Array:
        owned = needs.owned
        n, table = owned.num_ranks, owned.table
        start, stop, first_needed = least_over(needs.start, needs.stop, (needs.rank - rank) % n)
        a, b = overlaps(start, stop, table[:, 0], table[:, 1])
        owner = table[b, 2]
        still = first_needed[a] < (owner - rank) % n  # by a rank between this one and the owner
        a, b, owner = a[still], b[still], owner[still]
        to_local = table[b, 3] - table[b, 0]
        first, last = np.full(n, FAR), np.zeros(n, dtype=np.int64)
        np.minimum.at(first, owner, np.maximum(start[a], table[b, 0]) + to_local)
        np.maximum.at(last, owner, np.minimum(stop[a], table[b, 1]) + to_local)
        pieces = np.arange(len(table))
        owner = table[:, 2]
        return _clipped(
            np.full(len(table), rank), (rank - owner) % n, pieces, first[owner], last[owner], owned
        )

    def lent(self, needs: Needs, owner: int) -> Array:
        owned = needs.owned
        n, mine = owned.num_ranks, np.nonzero(owned.table[:, 2] == owner)[0]
        table = owned.table[mine]
        a, b = overlaps(needs.start, needs.stop, table[:, 0], table[:, 1])
        to_local, hop = table[b, 3] - table[b, 0], (needs.rank[a] - owner) % n
        first, last = np.full(n, FAR), np.zeros(n, dtype=np.int64)
        np.minimum.at(first, hop, np.maximum(needs.start[a], table[b, 0]) + to_local)
        np.maximum.at(last, hop, np.minimum(needs.stop[a], table[b, 1]) + to_local)
        first = np.minimum.accumulate(first[::-1])[::-1]
        last = np.maximum.accumulate(last[::-1])[::-1]
        hop = np.repeat(np.arange(1, n), len(mine))
        return _clipped((owner + hop) % n, hop, np.tile(mine, n - 1), first[hop], last[hop], owned)


def _clipped(rank: Array, stage: Array, piece: Array, first: Array, last: Array, owned: Ownership) -> Array:
    """Fragments of rows `piece` of the table, cut to rows [first, last) of their owner's shard; none of stage 0."""
    table = owned.table[piece]
    begin = table[:, 3]
    start = np.maximum(begin, first)
    stop = np.minimum(begin + table[:, 1] - table[:, 0], last)
    keep = (start < stop) & (stage > 0)
    columns = {RANK: rank, STAGE: stage, OWNER: table[:, 2], START: start, STOP: stop}
    columns[AT] = table[:, 0] + start - begin
    out = np.zeros((int(keep.sum()), 7), dtype=np.int64)
    for column, values in columns.items():
        out[:, column] = values[keep]
    out = out[np.lexsort((out[:, START], out[:, STAGE], out[:, RANK]))]
    out[:, OFFSET] = offsets_within(
        out[:, RANK] * (owned.num_ranks + 1) + out[:, STAGE], out[:, STOP] - out[:, START]
    )
    return out
