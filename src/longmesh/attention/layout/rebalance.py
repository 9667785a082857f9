"""Rebalance: pairs of a busy rank are computed by an idle one, as rectangles away from home.

    keys of d  |  keys of i           The rows belong to busy rank d. Three ways to give some of them away, in
    -----------+-----------+          what they cost per pair (a query and its result cost `query_cost` keys):
               | 1 1 1 1 1 |
    rows       | 2 2 .     |          1  some rows, all the keys that idle rank i owns: i gets the rows' queries
    of d       | 2 2 .     |          2  all rows, some of those keys: and d need not receive these keys at all
    -----------+-----------+          3  any rectangle, to the idlest rank: queries and keys travel; near square

Ownership does not change, so tokens stay equal. Nothing moves while the busiest rank is within TOLERANCE
of the mean. Pitfall: a rectangle is cut out of every row of the busy rank at once, so that no pair is
in two rectangles.
"""

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from longmesh.attention.layout.base import Ownership
from longmesh.attention.mask.slices import (
    EW,
    HI,
    K0,
    K1,
    LO,
    Q0,
    Q1,
    Rectangle,
    area,
    area_of_one,
    subtract_rectangle,
)
from longmesh.attention.plan.schedule import WHO, rows_at_home

Array = np.ndarray

TOLERANCE = 0.018
ROUNDS_PER_RANK = 6
MIN_WIDTH = 64  # tokens; narrower strips cost more in calls than they balance
MIN_PART = 3  # a move brings at least this part of what is to be moved


class MovedWork(NamedTuple):
    cost: float  # keys' worth of traffic for each pair
    rectangle: Rectangle
    to: int


class Loads:
    """Who computes how much: each rank's rows with their areas, which change as rectangles are moved away.

    A move concerns one rank's few rows, and there are thousands of moves on a thousand ranks: hence areas that are
    kept, and single slices in Python's integers.
    """

    def __init__(self, slices: Array, owned: Ownership) -> None:
        rows = rows_at_home(slices, owned)
        rows = rows[np.argsort(rows[:, WHO], kind="stable")]
        pairs = area(rows)
        ends = np.searchsorted(rows[:, WHO], np.arange(1, owned.num_ranks))
        self.rows = np.split(rows, ends)
        self.pairs = np.split(pairs, ends)
        self.load = np.zeros(owned.num_ranks, dtype=np.int64)
        np.add.at(self.load, rows[:, WHO], pairs)

    def movable(self, rank: int) -> tuple[Array, Array]:
        """The rows that may be computed elsewhere, and their areas."""
        rows, pairs = self.rows[rank], self.pairs[rank]
        asked = rows[:, EW] == 1
        return (rows[~asked], pairs[~asked]) if asked.any() else (rows, pairs)

    def move(self, rectangle: Rectangle, source: int, to: int) -> bool:
        """Let `to` compute what `source` computes inside the rectangle; False if there is nothing."""
        rows, pairs = self.rows[source], self.pairs[source]
        q0, q1, k0, k1 = rectangle
        touched = (rows[:, Q0] < q1) & (rows[:, Q1] > q0) & (rows[:, K0] < k1) & (rows[:, K1] > k0)
        left = subtract_rectangle([tuple(row) for row in rows[touched].tolist()], rectangle)
        sizes = [area_of_one(*row) for row in left]
        taken = int(pairs[touched].sum()) - sum(sizes)
        if taken == 0:
            return False
        new = np.array(left, dtype=np.int64).reshape(-1, WHO + 1)
        self.rows[source] = np.concatenate([rows[~touched], new])
        self.pairs[source] = np.concatenate([pairs[~touched], np.array(sizes, dtype=np.int64)])
        self.load[source] -= taken
        self.load[to] += taken
        return True


def rebalance(slices: Array, owned: Ownership, query_cost: float, keys: Ownership | None = None) -> Ownership:
    """The same ownership with rectangles moved until the ranks are even, or no move helps. `keys`: who owns the keys,
    if they are other tokens."""
    loads = Loads(slices, owned)
    load, table = loads.load, (keys or owned).table
    mean = int(load.sum()) // owned.num_ranks
    moved: list[tuple[int, int, int, int, int]] = []
    for _ in range(ROUNDS_PER_RANK * owned.num_ranks):
        busy = int(load.argmax())
        if load[busy] <= mean * (1 + TOLERANCE):
            break
        move = _cheapest_move(*loads.movable(busy), busy, load, mean, table, query_cost)
        if move is None:
            break
        if not loads.move(move.rectangle, busy, move.to):
            break
        moved.append((*move.rectangle, move.to))
    return dataclasses.replace(owned, moved=tuple(moved))


def _cheapest_move(
    mine: Array, pairs: Array, busy: int, load: Array, mean: int, table: Array, query_cost: float
) -> MovedWork | None:
    if len(mine) == 0:
        return None
    known = _to_key_owner(mine, busy, load, mean, table, query_cost)
    other = _to_idlest(mine[int(pairs.argmax())], busy, load, mean, query_cost)
    if known is None or other is None:
        return known or other
    return known if known.cost <= other.cost else other


def _to_key_owner(
    mine: Array, busy: int, load: Array, mean: int, table: Array, query_cost: float
) -> MovedWork | None:
    """The cheapest move of kind 1 or 2: to a rank that owns the keys and has room."""
    first = table[:, 1].searchsorted(mine[:, K0], side="right")
    count = table[:, 0].searchsorted(mine[:, K1], side="left") - first
    a = np.repeat(np.arange(len(mine)), count)
    b = np.arange(len(a)) + np.repeat(first - (count.cumsum() - count), count)
    owner = table[b, 2]
    room = mean - load[owner]
    keep = np.nonzero((owner != busy) & (room > 0))[0]
    a, b, room = a[keep], b[keep], room[keep]
    k0, k1 = np.maximum(mine[a, K0], table[b, 0]), np.minimum(mine[a, K1], table[b, 1])
    # Of a band only some rows see these keys.
    q0, q1 = np.maximum(mine[a, Q0], k0 - mine[a, HI]), np.minimum(mine[a, Q1], k1 - mine[a, LO])
    width, height = k1 - k0, q1 - q0
    keep = np.nonzero((width >= MIN_WIDTH) & (height > 0))[0]
    if len(keep) == 0:
        return None
    b, k0, k1, q0, q1, width, height, room = (x[keep] for x in (b, k0, k1, q0, q1, width, height, room))
    wanted = np.minimum(load[busy] - mean, room)
    some_rows = np.minimum(height, -(-wanted // width))
    some_keys = np.minimum(width, -(-wanted // height))
    kinds = (
        (query_cost * some_rows - np.where(some_rows == height, width, 0), some_rows * width),
        (query_cost * height - some_keys, some_keys * height),
    )
    enough = wanted // MIN_PART
    cost = np.concatenate(
        [np.where(pairs >= enough, keys / np.minimum(pairs, wanted), np.inf) for keys, pairs in kinds]
    )
    best = int(cost.argmin())
    kind, i = divmod(best, len(b))
    if not math.isfinite(cost[best]):
        return None
    if kind == 0:
        rectangle = (int(q1[i] - some_rows[i]), int(q1[i]), int(k0[i]), int(k1[i]))
    else:
        rectangle = (int(q0[i]), int(q1[i]), int(k0[i]), int(k0[i] + some_keys[i]))
    return MovedWork(float(cost[best]), rectangle, int(table[b[i], 2]))


def _to_idlest(row: Array, busy: int, load: Array, mean: int, query_cost: float) -> MovedWork | None:
    """A move of kind 3: the last queries and first keys of the largest row."""
    idlest = int(load.argmin())
    wanted = int(min(load[busy] - mean, mean - load[idlest]))
    q0, q1, k0, k1 = row[:LO].tolist()
    height, width = q1 - q0, k1 - k0
    wide = min(width, max(1, math.isqrt(int(wanted * query_cost))))
    high = min(height, max(1, wanted // wide))
    wide = min(width, max(1, wanted // high))
    if high * wide < MIN_WIDTH * MIN_WIDTH // 16:
        return None
    rectangle = (q1 - high, q1, k0, k0 + wide)
    return MovedWork((query_cost * high + wide) / (high * wide), rectangle, idlest)
