"""Schedule: from slices, an ownership and a staging to buffers and blocks, for all ranks at once.

    slices --cut by query owner--> rows --which keys?--> fragments --staging--> stage buffers
                                     \\------------cut by fragment------------> tiles

A *fragment* is an interval of keys that one rank needs and one rank owns; the exchange says in which
stage it arrives. A stage's buffer holds its fragments in the order of their coordinates, so that a
document received from several ranks is one stretch of keys again and costs one kernel call.
Stage 0 is the rank's own shard, in its own order.

A rank may compute pairs whose queries live elsewhere (`Ownership.moved`): those queries are
appended to its own in the query buffer, and their blocks run in stages of their own after the
queries arrived.
"""

import dataclasses

import numpy as np

from longmesh.attention.exchange.base import Exchange
from longmesh.attention.exchange.fragment import AT, OFFSET, OWNER, RANK, STAGE, START, STOP
from longmesh.attention.layout.base import Ownership
from longmesh.attention.mask.slices import (
    K0,
    K1,
    Q0,
    Q1,
    make_slices,
    overlaps,
    shift_band,
    subtract,
    tighten,
)
from longmesh.attention.plan.intervals import offsets_within, unite
from longmesh.attention.plan.merge_tiles import merge_tiles

Array = np.ndarray

# The rank that computes a row: a column behind those of a slice.
WHO = 7


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """Arrays for all ranks. `tiles` has RANK and STAGE, then the columns of a slice, whose ranges are
    rows of the rank's query buffer and of the stage's key buffer. `queries` are fragments of
    STAGE 0 that lie behind a rank's own queries. `relay`: a stage is received from the rank before,
    out of its buffer of the stage before."""

    ownership: Ownership
    num_stages: int
    fragments: Array
    queries: Array
    tiles: Array
    relay: bool = False

    def is_local(self, stage: int) -> bool:
        """Whether a stage works on the rank's own shard: the first, and one for queries that arrived."""
        return stage == 0 or stage > self.fragments[:, STAGE].max(initial=0)


def rows_by_rank(slices: Array, owned: Ownership) -> Array:
    """The slices cut so that each is computed by one rank, which is added as column WHO."""
    table = owned.table
    home, away = _split_moved(slices, owned)
    a, b = overlaps(home[:, Q0], home[:, Q1], table[:, 0], table[:, 1])
    rows = np.concatenate([home[a], table[b, 2:3]], axis=1)
    rows[:, Q0] = np.maximum(rows[:, Q0], table[b, 0])
    rows[:, Q1] = np.minimum(rows[:, Q1], table[b, 1])
    return tighten(np.concatenate([rows, away]))


def _split_moved(slices: Array, owned: Ownership) -> tuple[Array, Array]:
    """The slices outside the moved rectangles, and inside them, those with column WHO."""
    if not owned.moved:
        return slices, np.zeros((0, WHO + 1), dtype=np.int64)
    moved = np.array(owned.moved, dtype=np.int64)
    a, b = overlaps(slices[:, Q0], slices[:, Q1], moved[:, 0], moved[:, 1])
    hit = (slices[a, K0] < moved[b, 3]) & (slices[a, K1] > moved[b, 2])
    a, b = a[hit], b[hit]
    away = np.concatenate([slices[a], moved[b, 4:5]], axis=1)
    for column, bound, narrow in (
        (Q0, 0, np.maximum),
        (Q1, 1, np.minimum),
        (K0, 2, np.maximum),
        (K1, 3, np.minimum),
    ):
        away[:, column] = narrow(away[:, column], moved[b, bound])
    touched = np.nonzero(np.bincount(a, minlength=len(slices)))[0]
    rectangles = make_slices(*map(tuple, moved[:, :4].tolist()))
    home = [np.delete(slices, touched, axis=0)]
    home += [subtract(slices[i : i + 1], rectangles[b[a == i]]) for i in touched.tolist()]
    return np.concatenate(home), away


def needed(rank: Array, start: Array, stop: Array, owned: Ownership) -> Array:
    """Fragments (STAGE and OFFSET still 0) that cover these intervals of each rank."""
    rank, start, stop = unite(rank, start, stop, owned.seq_len)
    table = owned.table
    a, b = overlaps(start, stop, table[:, 0], table[:, 1])
    return fragments_of(
        rank[a], np.maximum(start[a], table[b, 0]), np.minimum(stop[a], table[b, 1]), b, owned
    )


def fragments_of(rank: Array, start: Array, stop: Array, piece: Array, owned: Ownership) -> Array:
    """Fragments of coordinates [start, stop) within rows `piece` of the ownership's table."""
    out = np.zeros((len(rank), 7), dtype=np.int64)
    to_local = owned.table[piece, 3] - owned.table[piece, 0]
    out[:, RANK], out[:, OWNER], out[:, AT] = rank, owned.table[piece, 2], start
    out[:, START], out[:, STOP] = start + to_local, stop + to_local
    return out


def lay_out(fragments: Array, by: int = AT) -> Array:
    """Fragments sorted by (rank, stage, coordinate), each with its OFFSET in the stage's buffer."""
    out = fragments[np.lexsort((fragments[:, by], fragments[:, STAGE], fragments[:, RANK]))]
    group = out[:, RANK] * (out[:, STAGE].max(initial=0) + 1) + out[:, STAGE]
    out[:, OFFSET] = offsets_within(group, out[:, STOP] - out[:, START])
    return out


def own_fragments(owned: Ownership) -> Array:
    """Stage 0: each rank's own shard, in its own order."""
    table = owned.table
    out = fragments_of(table[:, 2], table[:, 0], table[:, 1], np.arange(len(table)), owned)
    out[:, OFFSET] = table[:, 3]
    return out


def remote_queries(rows: Array, owned: Ownership) -> Array:
    """Fragments of queries that a rank computes and does not own, behind its own queries."""
    if not owned.moved:
        return np.zeros((0, 7), dtype=np.int64)
    found = needed(rows[:, WHO], rows[:, Q0], rows[:, Q1], owned)
    found = lay_out(found[found[:, RANK] != found[:, OWNER]])
    found[:, OFFSET] += np.array(owned.counts)[found[:, RANK]]
    return found


def _cut(rows: Array, fragments: Array, seq_len: int, axis: tuple[int, int]) -> tuple[Array, Array, Array]:
    """Rows cut where the fragments of their rank end, the rank's fragment of each, and the shift from
    coordinates to rows of its buffer. `axis` is (Q0, Q1) or (K0, K1)."""
    low, high = axis
    base = rows[:, WHO] * (seq_len + 1)
    at, size = fragments[:, AT], fragments[:, STOP] - fragments[:, START]
    begin = at + fragments[:, RANK] * (seq_len + 1)
    a, b = overlaps(rows[:, low] + base, rows[:, high] + base, begin, begin + size)
    out = rows[a]
    out[:, low] = np.maximum(out[:, low], at[b])
    out[:, high] = np.minimum(out[:, high], at[b] + size[b])
    return out, b, fragments[b, OFFSET] - at[b]


def make_tiles(rows: Array, fragments: Array, queries: Array, owned: Ownership) -> Array:
    """Blocks of every rank and stage in buffer coordinates, merged where they touch.

    A block of remote queries on the rank's own keys waits for the queries: it has stage -1.
    """
    query_buffer = np.concatenate([own_fragments(owned), queries])
    rows, which, q_by = _cut(rows, query_buffer, owned.seq_len, (Q0, Q1))
    far = which >= len(owned.table)
    rows = np.concatenate([rows, q_by[:, None], far[:, None]], axis=1)
    rows, which, k_by = _cut(rows, fragments, owned.seq_len, (K0, K1))
    q_by, far = rows[:, 8].copy(), rows[:, 9] == 1
    for column, by in ((Q0, q_by), (Q1, q_by), (K0, k_by), (K1, k_by)):
        rows[:, column] += by
    shift_band(rows, k_by - q_by)
    rows[:, 8] = np.where(far & (fragments[which, STAGE] == 0), -1, fragments[which, STAGE])
    return merge_tiles(rows[:, :9])


def make_schedule(slices: Array, owned: Ownership, exchange: Exchange) -> Schedule:
    """The whole schedule of one batch row, for slices in the ownership's coordinates."""
    rows = rows_by_rank(slices, owned)
    queries = remote_queries(rows, owned)
    remote = needed(rows[:, WHO], rows[:, K0], rows[:, K1], owned)
    remote = remote[remote[:, RANK] != remote[:, OWNER]]
    # What is passed on must be one stretch of the buffer, so a ring keeps the order of the shard.
    remote = lay_out(exchange.stages(remote, owned), by=START if exchange.relays else AT)
    tiles = make_tiles(rows, np.concatenate([own_fragments(owned), remote]), queries, owned)
    num_stages = 1 + int(remote[:, STAGE].max(initial=0))
    if (tiles[:, 1] == -1).any():  # the own shard once more, for the queries that arrived
        tiles[tiles[:, 1] == -1, 1] = num_stages
        num_stages += 1
    return Schedule(owned, num_stages, remote, queries, tiles, exchange.relays)
