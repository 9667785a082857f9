"""Rebalance: give the busiest rank's pairs to the idlest, as a rectangle computed away from home.

    keys ->  +--------+           the rectangle's queries go to the helper, with the keys it does not own;
             |        |           its partial result comes back and is merged at home. Among rectangles of
    queries  |####    | height    one area the squarest costs the least, since queries and keys both travel.
             |####    |
             +--------+
               width

Ownership does not change, so tokens stay equal. Nothing moves while the busiest rank is within
TOLERANCE of the mean.
"""

import dataclasses
import math

import numpy as np

from longmesh.attention.layout.base import Ownership
from longmesh.attention.mask.slices import EW, K0, K1, Q0, Q1, area, intersect, make_slices, overlaps, tighten

TOLERANCE = 0.015
ROUNDS_PER_RANK = 4
MIN_TOKENS = 16  # thinner rectangles cost more in calls than they balance


def rebalance(slices: np.ndarray, owned: Ownership) -> Ownership:
    """The same ownership with rectangles moved until ranks are even, or no move helps."""
    table = owned.table
    a, b = overlaps(slices[:, Q0], slices[:, Q1], table[:, 0], table[:, 1])
    rows = np.concatenate([slices[a], table[b, 2:3]], axis=1)
    rows[:, Q0] = np.maximum(rows[:, Q0], table[b, 0])
    rows[:, Q1] = np.minimum(rows[:, Q1], table[b, 1])
    rows = tighten(rows)
    pairs = area(rows)
    load = np.zeros(owned.num_ranks, dtype=np.int64)
    np.add.at(load, rows[:, 7], pairs)
    mean = load.sum() // owned.num_ranks
    moved: list[tuple[int, int, int, int, int]] = []
    for _ in range(ROUNDS_PER_RANK * owned.num_ranks):
        busiest, idlest = int(np.argmax(load)), int(np.argmin(load))
        if load[busiest] <= mean * (1 + TOLERANCE):
            break
        amount = int(min(load[busiest] - mean, mean - load[idlest]))
        mine = np.nonzero((rows[:, 7] == busiest) & (rows[:, EW] == 0))[0]
        if len(mine) == 0:
            break
        largest = int(mine[np.argmax(pairs[mine])])
        rectangle = _corner(rows[largest], amount)
        if rectangle is None:
            break
        gone = int(area(intersect(rows[largest : largest + 1, :7], make_slices(rectangle))).sum())
        if gone == 0:
            break
        moved.append((*rectangle, idlest))
        load[busiest] -= gone
        load[idlest] += gone
        pairs[largest] -= gone
        rows[largest, Q1] = rectangle[0]  # what is moved is not looked at again
    return dataclasses.replace(owned, moved=tuple(moved))


def _corner(row: np.ndarray, amount: int) -> tuple[int, int, int, int] | None:
    """The rectangle at the last queries and first keys of a row, of about that area, near square."""
    height, width = int(row[Q1] - row[Q0]), int(row[K1] - row[K0])
    wide = min(width, max(MIN_TOKENS, math.isqrt(amount)))
    high = min(height, max(1, amount // wide))
    wide = min(width, max(1, amount // high))
    if high * wide < MIN_TOKENS * MIN_TOKENS:
        return None
    return int(row[Q1]) - high, int(row[Q1]), int(row[K0]), int(row[K0]) + wide
