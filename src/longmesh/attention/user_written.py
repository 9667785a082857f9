"""Checks of masks, layouts and exchanges that a user wrote, made when they are planned.

A pair of a query and a key that is counted twice, or not at all, gives a wrong result without a word. The package's own
masks, layouts and exchanges are proved by tests; those of others are looked at here, once for each plan.
"""

from __future__ import annotations

import numpy as np

from longmesh.attention.exchange.base import Exchange, hop_of
from longmesh.attention.exchange.fragment import OWNER, RANK, STAGE, START, STOP
from longmesh.attention.exchange.needs import Needs, Stretches
from longmesh.attention.layout.base import Ownership
from longmesh.attention.mask.block import UNBOUNDED
from longmesh.attention.mask.slices import (
    COLUMNS,
    EW,
    HI,
    LO,
    first_overlap,
    make_slices,
    overlaps,
    tighten,
)
from longmesh.errors import LongmeshError

Array = np.ndarray


def is_user_written(value: object) -> bool:
    """Whether the class of a value is not the package's."""
    return not type(value).__module__.startswith("longmesh.")


def check_slices(mask: object, slices: object, queries: tuple[int, int], kv_len: int) -> Array:
    """The slices of a mask over queries [start, stop) and keys [0, kv_len), tightened; an error if they are not
    disjoint slices of these."""
    if not isinstance(slices, np.ndarray) or slices.ndim != 2 or slices.shape[1] != COLUMNS:
        raise LongmeshError(
            f"mask {mask}: slices() returned {_shown(slices)}; return masks.make_slices((q0, q1, k0, k1), ...)"
        )
    if not np.issubdtype(slices.dtype, np.integer):
        raise LongmeshError(
            f"mask {mask}: slices() returned numbers of {slices.dtype}; they are whole: use int64"
        )
    slices = slices.astype(np.int64)
    slices[:, LO:EW] = np.clip(slices[:, LO:EW], -UNBOUNDED, UNBOUNDED)
    q0, q1, k0, k1, lo, hi, elementwise = slices.T
    wrong = (q1 < q0) | (k1 < k0) | (lo > hi)
    if wrong.any():
        raise LongmeshError(
            f"mask {mask}: slice {_row(slices[wrong][0])} ends before it begins; a slice is "
            "(q0, q1, k0, k1, lo, hi, elementwise) with q0 <= q1, k0 <= k1 and lo <= hi"
        )
    start, stop = queries
    outside = (q0 < q1) & (k0 < k1) & ((q0 < start) | (q1 > stop) | (k0 < 0) | (k1 > kv_len))
    if outside.any():
        raise LongmeshError(
            f"mask {mask}: slice {_row(slices[outside][0])} is outside of queries {start} to {stop} and keys 0 to "
            f"{kv_len}; cut it to the length that slices() is given"
        )
    if ((elementwise != 0) & (elementwise != 1)).any():
        raise LongmeshError(f"mask {mask}: the last column of a slice, elementwise, must be 0 or 1")
    slices = tighten(slices)
    pair = first_overlap(slices)
    if pair is not None:
        a, b = (_row(slices[i]) for i in pair)
        raise LongmeshError(
            f"mask {mask}: slices {a} and {b} overlap, so pairs in both would count twice; return disjoint slices, or "
            "combine two masks with |"
        )
    return slices


def check_moved(layout: object, owned: Ownership, kv_len: int) -> Ownership:
    """The ownership, if the rectangles that are computed away from home are disjoint and of tokens that exist."""
    moved = np.array(owned.moved, dtype=np.int64).reshape(-1, 5)
    q0, q1, k0, k1, rank = moved.T
    bad = (q0 < 0) | (q1 > owned.seq_len) | (q0 >= q1) | (k0 < 0) | (k1 > kv_len) | (k0 >= k1)
    bad |= (rank < 0) | (rank >= owned.num_ranks)
    if bad.any():
        raise LongmeshError(
            f"layout {layout}: moved={tuple(moved[bad][0].tolist())} is no rectangle (q0, q1, k0, k1, rank) of "
            f"{owned.seq_len} queries, {kv_len} keys and {owned.num_ranks} ranks"
        )
    pair = first_overlap(make_slices(*moved[:, :4].tolist()))
    if pair is not None:
        a, b = (tuple(moved[i].tolist()) for i in pair)
        raise LongmeshError(
            f"layout {layout}: the rectangles {a} and {b} of moved overlap, so pairs in both would be computed twice; "
            "make them disjoint"
        )
    return owned


def check_arrivals(exchange: object, needs: Needs, held: Stretches) -> None:
    """An error unless every key that a rank needs of others arrives there exactly once."""
    width = needs.owned.seq_len + 1
    order = np.lexsort((held.start, held.rank))
    start, stop = (held.rank * width + held.start)[order], (held.rank * width + held.stop)[order]
    twice = np.nonzero(start[1:] < stop[:-1])[0]
    if len(twice):
        rank, key = divmod(int(start[twice[0] + 1]), width)
        raise LongmeshError(
            f"exchange {exchange}: key {key} arrives at rank {rank} twice, so it would count twice; give each fragment "
            "to one stage"
        )
    rank, low, high = needs.remote
    a, b = overlaps(rank * width + low, rank * width + high, start, stop)
    got = np.bincount(
        a,
        weights=np.minimum((rank * width + high)[a], stop[b]) - np.maximum((rank * width + low)[a], start[b]),
        minlength=len(rank),
    )
    missing = np.nonzero(got < high - low)[0]
    if len(missing):
        i = missing[0]
        raise LongmeshError(
            f"exchange {exchange}: of keys {low[i]} to {high[i]}, which rank {rank[i]} needs, {int(got[i])} of "
            f"{high[i] - low[i]} arrive; bring every fragment in a stage >= 1"
        )


def check_passed_on(exchange: Exchange, needs: Needs) -> None:
    """An error unless every rank holds what it passes on, as one stretch of its buffer."""
    n = needs.owned.num_ranks
    held: dict[tuple[int, int, int], tuple[int, int]] = {}
    for rank in range(n):
        f = exchange.received(needs, rank)
        hops = hop_of(exchange.hops, f[:, RANK], f[:, STAGE], f[:, OWNER], n)
        if (hops == 0).any():
            stage, owner = f[hops == 0][0, [STAGE, OWNER]].tolist()
            raise LongmeshError(
                f"exchange {exchange}: keys of rank {owner} arrive at rank {rank} in stage {stage}, and hops of "
                f"{exchange.hops} do not lead there"
            )
        for stage, hop in sorted(set(zip(f[:, STAGE].tolist(), hops.tolist(), strict=True))):
            mine = f[(f[:, STAGE] == stage) & (hops == hop)]
            low, high = int(mine[:, START].min()), int(mine[:, STOP].max())
            if high - low != int((mine[:, STOP] - mine[:, START]).sum()):
                raise LongmeshError(
                    f"exchange {exchange}: what rank {rank} holds in stage {stage} is not one stretch of its owner's "
                    "shard; pass on all from the first key needed to the last"
                )
            held[rank, stage, hop] = low, high
    for (rank, stage, hop), (low, high) in held.items():
        first, last = held.get(((rank - hop) % n, stage - 1, hop), (0, 0)) if stage > 1 else (low, high)
        if low < first or high > last:
            raise LongmeshError(
                f"exchange {exchange}: rank {rank} is to get rows {low} to {high} of a shard in stage {stage} from "
                f"rank {(rank - hop) % n}, which held {first} to {last} in the stage before"
            )


def _row(one: Array) -> tuple[int, ...]:
    """The columns of a slice that say something, as `make_slices` takes them."""
    row = tuple(one.tolist())
    if row[EW]:
        return row
    return row[:LO] if (row[LO], row[HI]) == (-UNBOUNDED, UNBOUNDED) else row[:EW]


def _shown(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape}"
    return f"a {type(value).__name__}"
