"""Schedule: from slices, an ownership and an exchange to buffers and blocks, for one rank at a time.

    slices --cut by query owner--> rows --which keys?--> needs --exchange--> a rank's fragments, by stage
                                     \\----------- cut by stretches of its buffers ----------> its tiles

What is kept for all ranks grows with the pieces that they own; what pairs of ranks have to do with each other is found
when a rank asks. A *fragment* is an interval of keys that one rank needs and one rank owns. What one collective brings
from several ranks lies in a stage's buffer in the order of the coordinates, so that a document received from several
ranks is one stretch of keys again and costs one kernel call. What is passed on (a ring) stays in the order of its
owner's shard: a rank sends on one stretch of its buffer. Stage 0 is the rank's own shard, in its own order.

A rank may compute pairs whose queries live elsewhere (`Ownership.moved`): those queries are
appended to its own in the query buffer, and their blocks run in stages of their own after the
queries arrived.
"""

import dataclasses
import functools

import numpy as np

from longmesh.attention.exchange.base import Exchange, Prices
from longmesh.attention.exchange.fragment import AT, OFFSET, OWNER, RANK, STAGE, START, STOP, no_fragments
from longmesh.attention.exchange.needs import Needs, Stretches, join_fragments, join_stretches
from longmesh.attention.layout.base import Ownership
from longmesh.attention.mask.slices import (
    COLUMNS,
    EW,
    K0,
    K1,
    Q0,
    Q1,
    overlaps,
    shift_band,
    subtract_each,
    tighten,
)
from longmesh.attention.plan import merge_tiles as tile
from longmesh.attention.plan.cached_values import PickledByFields, kept_by_instance
from longmesh.attention.plan.intervals import offsets_within, unite
from longmesh.attention.user_written import check_arrivals, check_passed_on, is_user_written

Array = np.ndarray

# The rank that computes a row: a column behind those of a slice.
WHO = COLUMNS
# While tiles are made: how far queries were renumbered, and whether they are another rank's.
_Q_BY, _FAR = COLUMNS + 1, COLUMNS + 2
# The stage of a tile that waits for queries of others and works on the rank's own keys, until it has its number.
_LATER = -1
# Ranks, up to which the tiles of all are made in about the time of one rank's.
FEW = 32


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule(PickledByFields):
    """`ownership` says who owns the queries and `kv_ownership` who owns the keys: the same object if they are the same
    tokens. `rows` are the slices cut by the rank that computes them, sorted by it. `queries` are fragments of STAGE 0
    that lie behind a rank's own queries."""

    ownership: Ownership
    exchange: Exchange
    rows: Array
    queries: Array
    kv_ownership: Ownership

    @functools.cached_property
    def needs(self) -> Needs:
        return Needs.of(self.rows[:, WHO], self.rows[:, K0], self.rows[:, K1], self.kv_ownership)

    @functools.cached_property
    def last_stage(self) -> int:
        """The last stage in which keys arrive."""
        return self.exchange.last_stage(self.needs)

    @functools.cached_property
    def num_stages(self) -> int:
        return 1 + self.last_stage + self._has_later_tiles()

    @functools.cached_property
    def has_elementwise(self) -> bool:
        """Whether a block asks the mask's function for each pair."""
        return bool(self.rows[:, EW].any())

    def is_local(self, stage: int) -> bool:
        """Whether a stage works on the rank's own shard: the first, and one for queries that arrived."""
        return stage == 0 or stage > self.last_stage

    @kept_by_instance
    def received(self, rank: int) -> Array:
        """The fragments in a rank's buffers, by stage and offset."""
        return self.exchange.received(self.needs, rank)

    def lent(self, rank: int) -> Array:
        """The fragments of a rank's keys in the buffers of others."""
        return self.exchange.lent(self.needs, rank)

    def queries_of(self, rank: int) -> Array:
        """The fragments of queries that a rank computes for others."""
        return self.queries[self.queries[:, RANK] == rank]

    @kept_by_instance
    def tiles(self, rank: int) -> Array:
        """The blocks of one rank, by stage, in rows of its buffers."""
        if self.ownership.num_ranks > FEW:
            return self.tiles_alone(rank)
        low, high = np.searchsorted(self.all_tiles[:, tile.RANK], (rank, rank + 1))
        return self.all_tiles[low:high]

    def tiles_alone(self, rank: int) -> Array:
        """The blocks of one rank, found without those of others."""
        low, high = np.searchsorted(self.rows[:, WHO], (rank, rank + 1))
        keys = join_fragments(self.received(rank))
        pieces = self.ownership.pieces_of(rank), self.kv_ownership.pieces_of(rank)
        return self._numbered(make_tiles(self.rows[low:high], keys, self.queries_of(rank), *pieces))

    @functools.cached_property
    def all_tiles(self) -> Array:
        """The blocks of every rank."""
        tables = self.ownership.table, self.kv_ownership.table
        return self._numbered(make_tiles(self.rows, self.all_stretches, self.queries, *tables))

    @functools.cached_property
    def all_stretches(self) -> Stretches:
        """What is in the buffers of every rank."""
        return self.exchange.stretches(self.needs)

    def _has_later_tiles(self) -> bool:
        """Whether a rank has pairs of queries that are not its own with keys that are."""
        if not len(self.queries):
            return False
        table, keys = self.ownership.table, self.kv_ownership.table
        a, b = overlaps(self.rows[:, Q0], self.rows[:, Q1], table[:, 0], table[:, 1])
        far = self.rows[a, WHO] != table[b, 2]
        cut = self.rows[a[far]]
        cut[:, Q0] = np.maximum(cut[:, Q0], table[b[far], 0])
        cut[:, Q1] = np.minimum(cut[:, Q1], table[b[far], 1])
        cut = tighten(cut)
        width = self.kv_ownership.seq_len + 1
        base, own = cut[:, WHO] * width, keys[:, 2] * width
        hit, _ = overlaps(cut[:, K0] + base, cut[:, K1] + base, keys[:, 0] + own, keys[:, 1] + own)
        return len(hit) > 0

    def _numbered(self, tiles: Array) -> Array:
        later = tiles[:, tile.STAGE] == _LATER
        tiles[later, tile.STAGE] = self.last_stage + 1
        return tiles[np.lexsort((tiles[:, tile.STAGE], tiles[:, tile.RANK]))] if later.any() else tiles


def make_schedule(
    slices: Array,
    owned: Ownership,
    exchange: Exchange,
    keys: Ownership | None = None,
    prices: Prices | None = None,
) -> Schedule:
    """The schedule of one batch row, for slices in the ownership's coordinates. `keys`: who owns the keys, if they are
    other tokens than the queries; `prices`: what an exchange that moves queries chooses by."""
    rows = rows_by_rank(slices, owned)
    if exchange.moves_queries:
        assert prices is not None, "an exchange that moves queries is told what they weigh"
        rows = exchange.place(rows, owned, keys or owned, prices)
    rows = rows[np.argsort(rows[:, WHO], kind="stable")]
    moves = owned.moved or exchange.moves_queries
    queries = remote_queries(rows, owned) if moves else no_fragments()
    made = Schedule(owned, exchange, rows, queries, keys or owned)
    if is_user_written(getattr(exchange, "outer", exchange)):
        check_arrivals(exchange, made.needs, made.all_stretches)
        if exchange.hops:
            check_passed_on(exchange, made.needs)
    return made


def rows_by_rank(slices: Array, owned: Ownership) -> Array:
    """The slices cut so that each is computed by one rank, which is added as column WHO."""
    home = rows_at_home(slices, owned)
    if not owned.moved:
        return home
    moved = np.array(owned.moved, dtype=np.int64)
    a, b = _touching(home, moved)
    away, c = _touching(slices, moved)
    away = np.concatenate([slices[away], moved[c, 4:5]], axis=1)
    for column, bound, narrow in _BOUNDS:
        away[:, column] = narrow(away[:, column], moved[c, bound])
    return np.concatenate([subtract_each(home, a, moved[b]), tighten(away)])


# Which column of a slice a bound of a rectangle narrows, and how.
_BOUNDS = ((Q0, 0, np.maximum), (Q1, 1, np.minimum), (K0, 2, np.maximum), (K1, 3, np.minimum))


def _touching(slices: Array, moved: Array) -> tuple[Array, Array]:
    """Index pairs of slices and rectangles that meet."""
    a, b = overlaps(slices[:, Q0], slices[:, Q1], moved[:, 0], moved[:, 1])
    hit = (slices[a, K0] < moved[b, 3]) & (slices[a, K1] > moved[b, 2])
    return a[hit], b[hit]


def rows_at_home(slices: Array, owned: Ownership) -> Array:
    """The slices cut by the owner of their queries, which is added as column WHO."""
    table = owned.table
    a, b = overlaps(slices[:, Q0], slices[:, Q1], table[:, 0], table[:, 1])
    rows = np.concatenate([slices[a], table[b, 2:3]], axis=1)
    rows[:, Q0] = np.maximum(rows[:, Q0], table[b, 0])
    rows[:, Q1] = np.minimum(rows[:, Q1], table[b, 1])
    return tighten(rows)


def remote_queries(rows: Array, owned: Ownership) -> Array:
    """Fragments of queries that a rank computes and does not own, behind its own queries."""
    table = owned.table
    rank, start, stop = unite(rows[:, WHO], rows[:, Q0], rows[:, Q1], owned.seq_len)
    a, b = overlaps(start, stop, table[:, 0], table[:, 1])
    far = rank[a] != table[b, 2]
    a, b = a[far], b[far]
    to_local = table[b, 3] - table[b, 0]
    out = np.zeros((len(a), 7), dtype=np.int64)
    out[:, RANK], out[:, OWNER], out[:, AT] = rank[a], table[b, 2], np.maximum(start[a], table[b, 0])
    out[:, START] = out[:, AT] + to_local
    out[:, STOP] = np.minimum(stop[a], table[b, 1]) + to_local
    out[:, OFFSET] = offsets_within(out[:, RANK], out[:, STOP] - out[:, START])
    out[:, OFFSET] += np.array(owned.counts)[out[:, RANK]]
    return out


def _own_stretches(pieces: Array) -> Stretches:
    """Each rank's own shard: stage 0, in its own order."""
    return Stretches(pieces[:, 2], np.zeros(len(pieces), dtype=np.int64), *pieces[:, [0, 1, 3]].T)


def _query_stretches(queries: Array) -> Stretches:
    stop = queries[:, AT] + queries[:, STOP] - queries[:, START]
    return Stretches(queries[:, RANK], queries[:, STAGE], queries[:, AT], stop, queries[:, OFFSET])


def _cut(rows: Array, into: Stretches, axis: tuple[int, int]) -> tuple[Array, Array, Array]:
    """Rows cut where the stretches of their rank end, the stretch of each, and the shift from coordinates to rows
    of its buffer. `axis` is (Q0, Q1) or (K0, K1)."""
    low, high = axis
    width = 1 + max(into.stop.max(initial=0), rows[:, high].max(initial=0))
    base, begin = rows[:, WHO] * width, into.rank * width
    a, b = overlaps(rows[:, low] + base, rows[:, high] + base, into.start + begin, into.stop + begin)
    out = rows[a]
    out[:, low] = np.maximum(out[:, low], into.start[b])
    out[:, high] = np.minimum(out[:, high], into.stop[b])
    return out, b, into.offset[b] - into.start[b]


def make_tiles(rows: Array, keys: Stretches, queries: Array, pieces: Array, kv_pieces: Array) -> Array:
    """Blocks in rows of buffers, merged where they touch, for the ranks of these rows, who own these pieces.

    A block of remote queries on the rank's own keys waits for the queries: its stage is still _LATER.
    """
    query_buffer = join_stretches([_own_stretches(pieces), _query_stretches(queries)])
    rows, which, q_by = _cut(rows, query_buffer, (Q0, Q1))
    rows = np.concatenate([rows, q_by[:, None], (which >= len(pieces))[:, None]], axis=1)
    buffers = join_stretches([_own_stretches(kv_pieces), keys])
    rows, which, k_by = _cut(rows, buffers, (K0, K1))
    q_by, far, stage = rows[:, _Q_BY], rows[:, _FAR] == 1, buffers.stage[which]
    tiles = np.concatenate([rows[:, : WHO + 1], np.where(far & (stage == 0), _LATER, stage)[:, None]], axis=1)
    for column, by in ((Q0, q_by), (Q1, q_by), (K0, k_by), (K1, k_by)):
        tiles[:, column] += by
    shift_band(tiles, k_by - q_by)
    return tile.merge_tiles(tiles)
