"""Spread: a large document in pieces of like size over as many ranks as its area fills; small ones whole.

    rank 0   |AAAA|b|c|        A has the area of 2.4 ranks: three pieces, to the three ranks with the least to
    rank 1   |AAAA|d |         do; then the next largest, down to the smallest, which fill what is left. A piece
    rank 2   |AAAA|e|f|        makes as much of a received key as it is long, so pieces are few and long.
    rank 3   |BBBBB|gg|

The owner of a document's tail has too much to compute and that of its head too little: `rebalance` lets
the owner of the keys compute some of it, which costs as much as sending keys if a query costs a key.
"""

import itertools

import numpy as np

from longmesh.attention.layout.base import Ownership, Workload, collect, even_bounds
from longmesh.attention.layout.components import components
from longmesh.attention.mask import slices
from longmesh.attention.mask.block import UNBOUNDED
from longmesh.attention.mask.slices import Q0

PIECES_PER_SHARE = 0.8  # fewer, longer pieces than shares: a helper or two cost less than a piece more
SPREAD_FROM = 0.9  # of a rank's share of the area: smaller documents stay whole


def spread(work: Workload, ranks: int) -> Ownership:
    """Tokens exactly even; area even if the work of a document were even along it."""
    stretches = components(work.slices, work.seq_len)
    area = np.zeros(len(stretches), dtype=np.int64)
    np.add.at(
        area, np.searchsorted(stretches[:, 1], work.slices[:, Q0], side="right"), slices.area(work.slices)
    )
    share = int(area.sum()) / ranks
    room = np.diff(even_bounds(work.seq_len, ranks))
    load = np.zeros(ranks, dtype=np.int64)
    owned: list[tuple[int, int, int]] = []
    for i in np.argsort(-area, kind="stable").tolist():
        start, stop = stretches[i].tolist()
        pieces = 1
        if area[i] > SPREAD_FROM * share:
            pieces = max(1, -int(-area[i] * PIECES_PER_SHARE // share))
        bounds = even_bounds(stop - start, min(pieces, stop - start))
        density = int(area[i]) // (stop - start)
        for low, high in itertools.pairwise(bounds):
            owned += _place(start + low, start + high, density, room, load)
    return collect(work.seq_len, ranks, owned)


def _place(
    start: int, stop: int, density: int, room: np.ndarray, load: np.ndarray
) -> list[tuple[int, int, int]]:
    """A piece to the least loaded rank that has room for it, or cut where rooms end. Updates both arrays."""
    out: list[tuple[int, int, int]] = []
    while start < stop:
        fits = room >= stop - start
        rank = int(np.argmin(np.where(fits, load, UNBOUNDED)) if fits.any() else np.argmax(room))
        size = min(stop - start, int(room[rank]))
        out.append((start, start + size, rank))
        room[rank] -= size
        load[rank] += size * density
        start += size
    return out
