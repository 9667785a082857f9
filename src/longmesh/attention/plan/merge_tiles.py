"""Join tiles that touch, so that a stage runs few and large blocks.

    +----+----+          +---------+        +----+               +---------+
    |    |\\   |    ->    |     \\   |        |\\   |               |\\        |
    +----+----+          +---------+        +----+----+    ->    |    \\    |
                                            |     \\  |          |      \\  |
                                            +---------+          +---------+

Two tiles become their hull if one band fits both and the hull has no more pairs than they have
together. A side of the band that cuts nothing of a tile is unbounded there, and takes its
neighbour's value. Tiles are joined in pairs until nothing changes.
"""

import numpy as np

from longmesh.attention.mask.slices import COLUMNS, EW, HI, K0, K1, LO, Q0, Q1, area, tighten

Array = np.ndarray
# A tile is a slice in rows of a rank's query buffer and of its key buffer of a stage: two columns behind a slice's.
RANK, STAGE = COLUMNS, COLUMNS + 1


def merge_tiles(rows: Array) -> Array:
    """The same pairs in fewer tiles, in a fixed order: by rank, stage, queries and keys."""
    tiles = tighten(rows)
    before = len(tiles) + 1
    while len(tiles) < before:
        before = len(tiles)
        for edge in (Q0, Q1):  # keys side by side, one edge of the query range in common
            tiles = _join(tiles, edge, along=(K0, K1))
        for edge in (K0, K1):
            tiles = _join(tiles, edge, along=(Q0, Q1))
    return tiles[np.lexsort((tiles[:, K0], tiles[:, Q0], tiles[:, STAGE], tiles[:, RANK]))]


def _join(t: Array, edge: int, along: tuple[int, int]) -> Array:
    """Join neighbours along an axis that have an edge of the other in common."""
    t = t[np.lexsort((t[:, along[0]], t[:, edge], t[:, EW], t[:, STAGE], t[:, RANK]))]
    a, b = t[:-1], t[1:]
    touch = a[:, along[1]] == b[:, along[0]]
    for column in (edge, EW, STAGE, RANK):
        touch &= a[:, column] == b[:, column]
    where = np.nonzero(touch)[0]
    if len(where) == 0:
        return t
    a, b = a[where], b[where]
    hull = a.copy()
    for column in (Q0, K0, HI):
        hull[:, column] = np.minimum(a[:, column], b[:, column])
    for column in (Q1, K1, LO):
        hull[:, column] = np.maximum(a[:, column], b[:, column])
    fits = area(hull) == area(a) + area(b)
    for tile in (a, b):  # the hull's band must cut nothing of either tile
        fits &= (hull[:, HI] >= tile[:, HI]) | (hull[:, HI] >= tile[:, K1] - 1 - tile[:, Q0])
        fits &= (hull[:, LO] <= tile[:, LO]) | (hull[:, LO] <= tile[:, K0] - tile[:, Q1] + 1)
    return _take_pairs(t, where[fits], hull[fits])


def _take_pairs(t: Array, where: Array, hull: Array) -> Array:
    """Replace tiles i and i + 1, for i in `where`, by their hull; of a run, every other pair."""
    if len(where) == 0:
        return t
    new_run = np.append(True, np.diff(where) > 1)
    run_start = where[new_run][np.cumsum(new_run) - 1]
    chosen = (where - run_start) % 2 == 0
    out = t.copy()
    out[where[chosen]] = hull[chosen]
    keep = np.ones(len(t), dtype=bool)
    keep[where[chosen] + 1] = False
    return tighten(out[keep])
