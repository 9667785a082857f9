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
    K0,
    K1,
    Q0,
    Q1,
    area,
    intersect,
    make_slices,
    overlaps,
    subtract,
    tighten,
)

Array = np.ndarray
Rectangle = tuple[int, int, int, int]
WHO = 7  # the column of the computing rank, behind those of a slice

TOLERANCE = 0.018
ROUNDS_PER_RANK = 6
MIN_WIDTH = 64  # tokens; narrower strips cost more in calls than they balance
MIN_PART = 8  # a move brings at least this part of what is to be moved


class Move(NamedTuple):
    cost: float  # keys' worth of traffic for each pair
    rectangle: Rectangle
    to: int


def rows_at_home(slices: Array, owned: Ownership) -> Array:
    """The slices cut by the owner of their queries, which is added as column WHO."""
    table = owned.table
    a, b = overlaps(slices[:, Q0], slices[:, Q1], table[:, 0], table[:, 1])
    rows = np.concatenate([slices[a], table[b, 2:3]], axis=1)
    rows[:, Q0] = np.maximum(rows[:, Q0], table[b, 0])
    rows[:, Q1] = np.minimum(rows[:, Q1], table[b, 1])
    return tighten(rows)


def rebalance(slices: Array, owned: Ownership, query_cost: float) -> Ownership:
    """The same ownership with rectangles moved until the ranks are even, or no move helps."""
    rows = rows_at_home(slices, owned)
    by_rank = [rows[rows[:, WHO] == rank] for rank in range(owned.num_ranks)]
    load = np.zeros(owned.num_ranks, dtype=np.int64)
    np.add.at(load, rows[:, WHO], area(rows))
    mean = int(load.sum()) // owned.num_ranks
    moved: list[tuple[int, int, int, int, int]] = []
    for _ in range(ROUNDS_PER_RANK * owned.num_ranks):
        busy = int(np.argmax(load))
        if load[busy] <= mean * (1 + TOLERANCE):
            break
        move = _cheapest_move(by_rank[busy], busy, load, mean, owned.table, query_cost)
        if move is None:
            break
        cut = make_slices(move.rectangle)
        pairs = int(area(intersect(by_rank[busy][:, :WHO], cut)).sum())
        moved.append((*move.rectangle, move.to))
        load[busy] -= pairs
        load[move.to] += pairs
        by_rank[busy] = subtract(by_rank[busy], cut)
    return dataclasses.replace(owned, moved=tuple(moved))


def _cheapest_move(
    mine: Array, busy: int, load: Array, mean: int, table: Array, query_cost: float
) -> Move | None:
    mine = mine[mine[:, EW] == 0]
    if len(mine) == 0:
        return None
    known = _to_key_owner(mine, busy, load, mean, table, query_cost)
    other = _to_idlest(mine, busy, load, mean, query_cost)
    if known is None or other is None:
        return known or other
    return known if known.cost <= other.cost else other


def _to_key_owner(
    mine: Array, busy: int, load: Array, mean: int, table: Array, query_cost: float
) -> Move | None:
    """The cheapest move of kind 1 or 2: to a rank that owns the keys and has room."""
    a, b = overlaps(mine[:, K0], mine[:, K1], table[:, 0], table[:, 1])
    owner = table[b, 2]
    k0, k1 = np.maximum(mine[a, K0], table[b, 0]), np.minimum(mine[a, K1], table[b, 1])
    keep = (owner != busy) & (load[owner] < mean) & (k1 - k0 >= MIN_WIDTH)
    if not keep.any():
        return None
    a, owner, k0, k1 = a[keep], owner[keep], k0[keep], k1[keep]
    q0, q1 = mine[a, Q0], mine[a, Q1]
    wanted = np.minimum(load[busy] - mean, mean - load[owner])
    width, height = k1 - k0, q1 - q0
    some_rows = np.minimum(height, -(-wanted // width))
    some_keys = np.minimum(width, -(-wanted // height))
    by_rows = query_cost * some_rows - np.where(some_rows == height, width, 0)
    by_keys = query_cost * height - some_keys
    cost = np.stack([by_rows, by_keys]) / np.minimum([some_rows * width, some_keys * height], wanted)
    enough = np.stack([some_rows * width, some_keys * height]) >= wanted // MIN_PART
    cost = np.where(enough, cost, np.inf)
    kind, i = divmod(int(np.argmin(cost)), len(a))
    if not math.isfinite(cost[kind, i]):
        return None
    if kind == 0:
        rectangle = (int(q1[i] - some_rows[i]), int(q1[i]), int(k0[i]), int(k1[i]))
    else:
        rectangle = (int(q0[i]), int(q1[i]), int(k0[i]), int(k0[i] + some_keys[i]))
    return Move(float(cost[kind, i]), rectangle, int(owner[i]))


def _to_idlest(mine: Array, busy: int, load: Array, mean: int, query_cost: float) -> Move | None:
    """A move of kind 3: the last queries and first keys of the largest row."""
    idlest = int(np.argmin(load))
    wanted = int(min(load[busy] - mean, mean - load[idlest]))
    row = mine[int(np.argmax(area(mine)))]
    height, width = int(row[Q1] - row[Q0]), int(row[K1] - row[K0])
    wide = min(width, max(1, math.isqrt(int(wanted * query_cost))))
    high = min(height, max(1, wanted // wide))
    wide = min(width, max(1, wanted // high))
    if high * wide < MIN_WIDTH * MIN_WIDTH // 16:
        return None
    rectangle = (int(row[Q1]) - high, int(row[Q1]), int(row[K0]), int(row[K0]) + wide)
    return Move((query_cost * high + wide) / (high * wide), rectangle, idlest)
