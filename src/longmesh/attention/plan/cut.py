"""How queries and keys are cut over ranks: by their layouts, rank by rank and group by group.

one sequence      queries |0|1|1|0|                 queries and keys are the same tokens: one cut
                  keys    |0|1|1|0|
two               queries |0|1|                     keys first, by a layout of their own; then the queries, whose
                  keys    |0000|1111|               layout may look at where the keys are
"""

import dataclasses
import functools
from typing import NamedTuple

import numpy as np

from longmesh.attention.layout.base import Ownership, TokenLayout, Workload, collect, even_bounds
from longmesh.attention.mask.axes import SequenceAxes, slices_on
from longmesh.attention.mask.base import Mask
from longmesh.attention.mask.slices import HI, K0, K1, LO, Q0, Q1, stride_slices
from longmesh.attention.user_written import check_moved, is_user_written
from longmesh.errors import LongmeshError


class Asked(NamedTuple):
    """What is to be computed for one batch row, and what layouts may look at besides."""

    mask: Mask
    axes: SequenceAxes
    row: int
    num_heads: int
    chunk: int
    query_cost: float


class Cuts(NamedTuple):
    """Who owns queries and keys: rank by rank, and group by group as the exchange sees it. The cuts of the keys are the
    same objects as those of the queries where they are the same tokens."""

    owned: Ownership
    grouped: Ownership
    kv_owned: Ownership
    kv_grouped: Ownership


def cut_both(
    layout: TokenLayout, kv_layout: TokenLayout | None, asked: Asked, inner: int, outer: int
) -> Cuts:
    """The cuts of one batch row over `outer` groups of `inner` ranks."""
    if kv_layout is None:
        owned = _own_tokens(layout, _workload(asked), inner, outer)
        return Cuts(*owned, *owned)
    keys = _own_tokens(kv_layout, _key_workload(asked), inner, outer)
    # Whose blocks are computed away from home is for the queries' layout to say.
    kv_owned, kv_grouped = (dataclasses.replace(owned, moved=()) for owned in keys)
    work = _workload(asked, kv_grouped if outer > 1 and inner > 1 and layout.follows_mask else kv_owned)
    owned, grouped = _own_tokens(layout, work, inner, outer)
    if grouped.stride != kv_grouped.stride:
        raise LongmeshError(
            f"layout {layout} numbers queries in stripes of {grouped.stride} and kv_layout {kv_layout} keys in stripes "
            f"of {kv_grouped.stride}; give both sides the striped layout, or neither"
        )
    return Cuts(owned, grouped, kv_owned, kv_grouped)


def slices_in(cuts: Cuts, asked: Asked) -> np.ndarray:
    """The slices of the mask in the coordinates of the cuts."""
    slices, stride = slices_of(asked.mask, asked.axes, asked.row, asked.num_heads), cuts.grouped.stride
    return slices if stride == 1 else stride_slices(slices, stride, asked.axes.seq_len, asked.axes.kv_len)


@functools.lru_cache(maxsize=256)
def slices_of(mask: Mask, axes: SequenceAxes, row: int, num_heads: int) -> np.ndarray:
    """The slices of one batch row, made once."""
    out = slices_on(mask, axes, row, num_heads)
    out.flags.writeable = False
    return out


@functools.lru_cache(maxsize=256)
def _workload(asked: Asked, keys: Ownership | None = None) -> Workload:
    slices = slices_of(asked.mask, asked.axes, asked.row, asked.num_heads)
    length, chunk, cost = asked.axes.seq_len, asked.chunk, asked.query_cost
    return Workload(slices, length, chunk, cost, one_sequence=keys is None, keys=keys)


@functools.lru_cache(maxsize=256)
def _key_workload(asked: Asked) -> Workload:
    """What a layout of the keys may look at: the same pairs, keys in the place of queries."""
    slices = slices_of(asked.mask, asked.axes, asked.row, asked.num_heads)
    turned = slices.copy()
    turned[:, [Q0, Q1, K0, K1]] = slices[:, [K0, K1, Q0, Q1]]
    turned[:, LO], turned[:, HI] = -slices[:, HI], -slices[:, LO]
    return Workload(turned, asked.axes.kv_len, asked.chunk, asked.query_cost, one_sequence=False)


@functools.lru_cache(maxsize=256)
def _assign(layout: TokenLayout, work: Workload, ranks: int) -> Ownership:
    """The cut, once for all exchanges that are tried with it."""
    owned = layout.assign(work, ranks)
    kv_len = work.keys.seq_len if work.keys else work.seq_len
    return check_moved(layout, owned, kv_len) if is_user_written(layout) else owned


def _own_tokens(layout: TokenLayout, work: Workload, inner: int, outer: int) -> tuple[Ownership, Ownership]:
    """Who owns which tokens: rank by rank, and group by group as the exchange sees it."""
    if inner == 1:
        owned = _assign(layout, work, outer)
        return owned, owned
    if layout.follows_mask and outer > 1:  # balance the groups, then deal a group's tokens to its ranks
        grouped = _assign(layout, work, outer)
        return _subdivide(grouped, inner), grouped
    owned = _assign(layout, work, inner * outer)
    if outer == 1:
        return owned, collect(work.seq_len, 1, [(0, work.seq_len, 0)])
    return owned, _join_groups(owned, inner)


def _join_groups(owned: Ownership, inner: int) -> Ownership:
    spans = [(*span, rank // inner) for rank, pieces in enumerate(owned.pieces) for span in pieces]
    return collect(owned.seq_len, owned.num_ranks // inner, spans, owned.stride)


def _subdivide(grouped: Ownership, inner: int) -> Ownership:
    """A group's tokens, in its order, dealt evenly to its ranks."""
    owned: list[tuple[int, int, int]] = []
    for group, pieces in enumerate(grouped.pieces):
        bounds = even_bounds(grouped.counts[group], inner)
        at = 0
        for start, stop in pieces:
            for member in range(inner):
                low, high = max(at, bounds[member]), min(at + stop - start, bounds[member + 1])
                if low < high:
                    owned.append((start + low - at, start + high - at, group * inner + member))
            at += stop - start
    return collect(grouped.seq_len, grouped.num_ranks * inner, owned, grouped.stride)
