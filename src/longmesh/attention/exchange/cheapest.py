"""Cheapest: for each pair of ranks and each sequence, what is lighter travels: the keys to the queries, or the queries
to the keys and their partial results back.

    rank 0  T new tokens, some cached       T small: queries go to the ranks that hold the cache, results come back
    rank 1  cached tokens                   T large: the cached keys come to the queries
    rank 2  cached tokens

A query and its partial result in fp32 weigh `query_cost` keys. What a pair of ranks exchanges for one sequence has
nothing to do with other pairs and sequences, so choosing for each is the least there is: never more bytes than all keys
or all queries. Where all keys, or all queries, are no more bytes than that in fewer collectives, they are taken.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from longmesh.attention.exchange.base import Prices
from longmesh.attention.exchange.sparse import Sparse
from longmesh.attention.layout.base import Ownership
from longmesh.attention.mask.slices import K0, K1, Q0, Q1, overlaps, tighten
from longmesh.attention.plan.intervals import unite
from longmesh.attention.plan.schedule import WHO

Array = np.ndarray


@dataclasses.dataclass(frozen=True)
class Cheapest(Sparse):
    """For each pair of ranks and each sequence, keys to the queries or queries to the keys: what weighs less.

    >>> plan = plan_attention(seq_len=4, kv_len=4096, ranks=2, mask=masks.full(), exchange=Cheapest())
    >>> [int(stats.received_bytes) for stats in plan.stats()]  # two queries there, and two results back
    [8256, 8256]
    """

    moves_queries = True

    def auto_takes(self, ranks: int, num_heads: int, one_sequence: bool) -> bool:
        return not one_sequence  # in one sequence the layout (Solve) says which queries travel

    def place(self, rows: Array, owned: Ownership, kv_owned: Ownership, prices: Prices) -> Array:
        cells = _cut_by_key_owner(rows, owned, kv_owned)
        if not len(cells.rows):
            return rows
        groups = _weigh(cells, owned.num_ranks, owned.seq_len, kv_owned.seq_len)
        light = groups.queries * prices.away_bytes < groups.keys * prices.key_bytes
        every = np.ones_like(light)
        schemes = [light, ~every, every]  # queries travel: of some, of none, of all
        best = min(groups.bytes(scheme, prices) for scheme in schemes[1:])
        as_light = [scheme for scheme in schemes if groups.bytes(scheme, prices) <= best]
        chosen = min(as_light, key=lambda scheme: groups.time_us(scheme, prices))
        if not chosen.any():
            return rows  # whole, not cut by pairs of ranks
        moved = chosen[cells.group]
        away = cells.rows[moved]
        away[:, WHO] = cells.owner[moved]
        return np.concatenate([cells.at_home, cells.rows[~moved], away])


class _Cells(NamedTuple):
    """`rows`: pairs of one rank's queries with one other rank's keys, that `owner` owns, in a `group` for each pair of
    ranks and sequence. `at_home`: pairs with the rank's own keys, and those that were placed before."""

    rows: Array
    owner: Array
    group: Array
    at_home: Array


def _cut_by_key_owner(rows: Array, owned: Ownership, kv_owned: Ownership) -> _Cells:
    table, keys = owned.table, kv_owned.table
    first = np.searchsorted(table[:, 1], rows[:, Q0], side="right")
    placed = table[first, 2] != rows[:, WHO] if len(rows) else np.zeros(0, dtype=bool)
    a, b = overlaps(rows[:, K0], rows[:, K1], keys[:, 0], keys[:, 1])
    cut = rows[a]
    cut[:, K0], cut[:, K1] = np.maximum(cut[:, K0], keys[b, 0]), np.minimum(cut[:, K1], keys[b, 1])
    sequence = _sequences(rows)[a]
    found = tighten(np.concatenate([cut, keys[b, 2:3], sequence[:, None], placed[a, None]], axis=1))
    owner, number, fixed = found[:, WHO + 1], found[:, WHO + 2], found[:, WHO + 3] == 1
    far = (owner != found[:, WHO]) & ~fixed
    pair = found[far, WHO] * owned.num_ranks + owner[far]
    key = number[far] * owned.num_ranks**2 + pair
    _, group = np.unique(key, return_inverse=True)
    return _Cells(found[far, : WHO + 1], owner[far], group, found[~far, : WHO + 1])


def _sequences(rows: Array) -> Array:
    """A number for each row, the same for rows that share a query or a key, or are connected by others that do."""
    clusters = [_clusters(rows[:, low], rows[:, high]) for low, high in ((Q0, Q1), (K0, K1))]
    label, before = np.arange(len(rows)), np.full(len(rows), -1)
    while (label != before).any():
        before = label
        for cluster in clusters:
            least = np.full(len(rows), len(rows))
            np.minimum.at(least, cluster, label)
            label = least[cluster]
    return label


def _clusters(start: Array, stop: Array) -> Array:
    """Numbers of intervals: the same for those that overlap."""
    order = np.argsort(start, kind="stable")
    reach = np.maximum.accumulate(stop[order])
    new = np.zeros(len(order), dtype=np.int64)
    new[1:] = start[order][1:] >= reach[:-1]
    out = np.empty(len(order), dtype=np.int64)
    out[order] = np.cumsum(new)
    return out


class _Groups(NamedTuple):
    """For each pair of ranks and sequence: who has the queries, who has the keys, and how many of either."""

    asks: Array
    owns: Array
    queries: Array
    keys: Array
    num_ranks: int

    def bytes(self, away: Array, prices: Prices) -> int:
        """All that travels, if queries do where `away` says so, and keys elsewhere."""
        keys, queries = int(self.keys[~away].sum()), int(self.queries[away].sum())
        return keys * prices.key_bytes + queries * prices.away_bytes

    def time_us(self, away: Array, prices: Prices) -> float:
        """The transfers of the busiest ranks, one collective after another."""
        moves = (  # who receives, how many, where, and what each weighs
            (self.asks, self.keys, ~away, prices.key_bytes),
            (self.owns, self.queries, away, prices.query_bytes),
            (self.asks, self.queries, away, prices.result_bytes),
        )
        total = 0.0
        for receiver, count, which, weight in moves:
            if which.any():
                arrives = np.bincount(
                    receiver[which], weights=count[which] * weight, minlength=self.num_ranks
                )
                total += prices.link.time_us(float(arrives.max()), self.num_ranks - 1)
        return total


def _weigh(cells: _Cells, num_ranks: int, seq_len: int, kv_len: int) -> _Groups:
    count = int(cells.group.max()) + 1

    def united(low: int, high: int, length: int) -> Array:
        """How many tokens of an axis each group has."""
        group, start, stop = unite(cells.group, cells.rows[:, low], cells.rows[:, high], length)
        return np.bincount(group, weights=stop - start, minlength=count).astype(np.int64)

    asks, owns = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    asks[cells.group], owns[cells.group] = cells.rows[:, WHO], cells.owner
    return _Groups(asks, owns, united(Q0, Q1, seq_len), united(K0, K1, kv_len), num_ranks)
