"""AttentionPlan: everything that one attention call does, as frozen values.

    plan.rows[row].rank(r).stages[s]
         |           |        `- what arrives, what is sent, which blocks run on it
         |           `- one rank: its tokens, its heads, queries it computes for others
         `- a batch row (one stands for all rows, unless the mask differs by row)

What an executor does for a rank, per batch row:

    1. if `heads` is set: all-to-all within the group, so that the query, key and value buffers hold the
       group's tokens (my token i at row `group_rows[i]`) and my heads only; 2 and 3 for one group of heads
       after the other, the next one's all-to-all under way;
    2. start stage 1's transfer, compute stage 0 (`local`: the buffer is my own shard), and so on;
    3. queries received from others (`queries_in`) lie behind my own in the query buffer; they arrive
       with stage 1's transfer; their partial results go back and are merged at home;
    4. backward: the same stages; gradients of a stage's buffer go to the ranks in `kv`, and are summed.

Pitfall: a block's rows are rows of buffers, never global positions; `positions` maps them back, and a
block with `elementwise` asks `mask.visible` at those positions.
"""

import dataclasses
import functools
import hashlib
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from longmesh.attention.exchange.base import Exchange, hop_of
from longmesh.attention.exchange.fragment import AT, OFFSET, OWNER, RANK, STAGE, START, STOP
from longmesh.attention.exchange.ulysses import HeadShare
from longmesh.attention.layout.base import Ownership, TokenLayout
from longmesh.attention.mask.axes import SequenceAxes
from longmesh.attention.mask.base import Mask
from longmesh.attention.mask.block import Block
from longmesh.attention.mask.slices import COLUMNS, EW
from longmesh.attention.plan import merge_tiles as tile
from longmesh.attention.plan.cached_values import PickledByFields, kept_by_instance
from longmesh.attention.plan.head_sizes import HeadSizes
from longmesh.attention.plan.intervals import spans
from longmesh.attention.plan.schedule import Schedule
from longmesh.plan.cluster import Cluster

if TYPE_CHECKING:
    from longmesh.attention.plan.predict import Prediction
    from longmesh.attention.plan.stats import RankStats


class Rows(NamedTuple):
    """Rows [start, stop) of a buffer of `rank`.

    >>> plan = plan_attention(seq_len=8, ranks=2, layout="contiguous", exchange="sparse")
    >>> plan.rows[0].rank(1).stages[1].receives  # all keys of rank 0
    (Rows(rank=0, start=0, stop=4),)
    """

    rank: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class Stage:
    """`kv`: the buffer from its first row to its last, as rows of the owners' shards.

    `receives` and `sends` are in the order of the bytes: rows of the *sender's* buffer, which is its own
    shard, or with `relay` its buffer of the stage before. `lent` are rows of the own shard in buffers of others: their
    gradients come home from there. A `local` stage's buffer is the own shard.

    >>> plan = plan_attention(seq_len=8, ranks=2, layout="contiguous", exchange="sparse")
    >>> own, arrived = plan.rows[0].rank(1).stages
    >>> own.local, arrived.kv_rows, len(arrived.blocks)
    (True, 4, 1)
    """

    kv: tuple[Rows, ...]
    kv_rows: int
    receives: tuple[Rows, ...]
    sends: tuple[Rows, ...]
    lent: tuple[Rows, ...]
    blocks: tuple[Block, ...]
    local: bool
    relay: bool


@dataclasses.dataclass(frozen=True)
class RankPlan:
    """What one rank does for one batch row. With `heads`, ranks in `stages` are groups.

    >>> plan = plan_attention(seq_len=1000, ranks=2, layout="zigzag", exchange="ring")
    >>> mine = plan.rows[0].rank(1)
    >>> mine.tokens, len(mine.stages)
    (500, 2)
    """

    rank: int
    group: int
    tokens: int
    kv_tokens: int
    query_rows: int
    queries_in: tuple[Rows, ...]
    queries_out: tuple[Rows, ...]
    stages: tuple[Stage, ...]
    heads: HeadShare | None


@dataclasses.dataclass(frozen=True, eq=False)
class RowPlan(PickledByFields):
    """The plan of one batch row: `ownership` cuts tokens over all ranks, `schedule` runs on groups of
    `inner` ranks (one rank each, unless heads are split). `kv_ownership` cuts the keys: the same object, unless they
    are other tokens than the queries.

    >>> row = plan_attention(seq_len=8, ranks=2, layout="zigzag", exchange="ring").rows[0]
    >>> row.positions(0), row.positions(1)
    (array([0, 1, 6, 7]), array([2, 3, 4, 5]))
    """

    ownership: Ownership
    schedule: Schedule
    inner: int
    shares: tuple[HeadShare, ...] | None
    kv_ownership: Ownership

    def positions(self, rank: int) -> np.ndarray:
        """Global positions of the rank's tokens, in local order."""
        return self.ownership.positions(rank)

    def group_positions(self, rank: int) -> np.ndarray:
        """Global positions of the rows of the group's query buffer, remote queries included."""
        owned, group = self.schedule.ownership, rank // self.inner
        far = self.schedule.queries_of(group)
        return owned.token_of(np.concatenate([owned.coordinates(group), spans(far[:, AT], _sizes(far))]))

    def stage_positions(self, rank: int, stage: int) -> np.ndarray:
        """Global positions of the rows of a stage's key buffer."""
        owned, group = self.schedule.kv_ownership, rank // self.inner
        if self.schedule.is_local(stage):
            return owned.positions(group)
        f = self.schedule.received(group)
        f = f[f[:, STAGE] == stage]
        return owned.token_of(spans(f[:, AT], _sizes(f)))

    def group_rows(self, rank: int) -> np.ndarray:
        """For each of the rank's tokens, its row in the group's buffers."""
        return _rows_in(self.ownership.positions(rank), self.schedule.ownership, rank // self.inner)

    def kv_group_rows(self, rank: int) -> np.ndarray:
        """For each of the rank's keys, its row in the group's buffers."""
        return _rows_in(self.kv_ownership.positions(rank), self.schedule.kv_ownership, rank // self.inner)

    @kept_by_instance
    def rank(self, rank: int) -> RankPlan:
        """What one rank does."""
        s, group = self.schedule, rank // self.inner
        away, far = s.queries[s.queries[:, OWNER] == group], s.queries_of(group)
        return RankPlan(
            rank=rank,
            group=group,
            tokens=self.ownership.counts[rank],
            kv_tokens=self.kv_ownership.counts[rank],
            query_rows=s.ownership.counts[group] + int(_sizes(far).sum()),
            queries_in=_rows(far, OWNER),
            queries_out=_rows(away, RANK),
            stages=_stages(s, group),
            heads=self.shares[rank % self.inner] if self.shares else None,
        )


def _rows_in(positions: np.ndarray, owned: Ownership, group: int) -> np.ndarray:
    """The rows that tokens have in the buffer of a group that owns them."""
    place = np.empty(owned.seq_len, dtype=np.int64)
    mine = owned.positions(group)
    place[mine] = np.arange(len(mine))
    return place[positions]


def _sizes(fragments: np.ndarray) -> np.ndarray:
    return fragments[:, STOP] - fragments[:, START]


def _rows(fragments: np.ndarray, peer: int) -> tuple[Rows, ...]:
    return tuple(map(Rows._make, fragments[:, [peer, START, STOP]].tolist()))


def _stages(s: Schedule, rank: int) -> tuple[Stage, ...]:
    """All stages of one rank."""
    numbers = np.arange(s.num_stages + 1)
    lent = s.lent(rank)
    lent = lent[np.argsort(lent[:, STAGE], kind="stable")]
    tiles, mine = s.tiles(rank), s.received(rank)
    tiles_at = np.searchsorted(tiles[:, tile.STAGE], numbers).tolist()
    mine_at = np.searchsorted(mine[:, STAGE], numbers).tolist()
    lent_at = np.searchsorted(lent[:, STAGE], numbers).tolist()
    blocks = [Block(*row[:EW], elementwise=bool(row[EW])) for row in tiles[:, :COLUMNS].tolist()]
    kv, sends = _rows(mine, OWNER), _rows(lent, RANK)
    held = _Relay(s, rank) if s.exchange.hops else None
    own = s.kv_ownership.counts[rank]
    found: list[Stage] = []
    for stage in range(s.num_stages):
        run = tuple(blocks[tiles_at[stage] : tiles_at[stage + 1]])
        if s.is_local(stage):
            found.append(Stage((Rows(rank, 0, own),), own, (), (), (), run, local=True, relay=False))
            continue
        arrive = kv[mine_at[stage] : mine_at[stage + 1]]
        rows = sum(piece.stop - piece.start for piece in arrive)
        leave = sends[lent_at[stage] : lent_at[stage + 1]]
        way = (arrive, leave) if held is None else (held.receives(stage), held.sends(stage))
        found.append(Stage(arrive, rows, *way, leave, run, local=False, relay=bool(s.exchange.hops)))
    return tuple(found)


class _Relay:
    """What one rank receives from the ranks that pass keys on to it, and what it passes on: rows of the sender's buffer
    of the stage before."""

    def __init__(self, s: Schedule, rank: int) -> None:
        self._rank, self._n, self._hops = rank, s.ownership.num_ranks, s.exchange.hops
        around = {(rank + way * hop) % self._n for hop in self._hops for way in (-1, 0, 1)}
        self._held = {r: self._stretches(s, r) for r in sorted(around)}

    def _stretches(self, s: Schedule, rank: int) -> dict[tuple[int, int], tuple[int, int, int]]:
        """By stage and hop, the rows [start, stop) of the owner's shard that a rank holds, and where they lie."""
        found: dict[tuple[int, int], tuple[int, int, int]] = {}
        f = s.received(rank)
        hops = hop_of(self._hops, f[:, RANK], f[:, STAGE], f[:, OWNER], self._n).tolist()
        for hop, (stage, start, stop, at) in zip(
            hops, f[:, [STAGE, START, STOP, OFFSET]].tolist(), strict=True
        ):
            low, high, first = found.get((stage, hop), (start, stop, at))
            found[stage, hop] = min(low, start), max(high, stop), min(first, at)
        return found

    def _rows(self, source: int, to: int, peer: int, stage: int, hop: int) -> tuple[int, Rows] | None:
        """Where the rows lie in the receiver's buffer, and in the sender's."""
        if (stage, hop) not in self._held[to]:
            return None
        start, stop, at = self._held[to][stage, hop]
        held_from, _, before = self._held[source][stage - 1, hop] if stage > 1 else (0, 0, 0)
        shift = before - held_from
        return at, Rows(peer, start + shift, stop + shift)

    def receives(self, stage: int) -> tuple[Rows, ...]:
        found = [
            self._rows((r := (self._rank - hop) % self._n), self._rank, r, stage, hop) for hop in self._hops
        ]
        return tuple(rows for _, rows in sorted(each for each in found if each is not None))

    def sends(self, stage: int) -> tuple[Rows, ...]:
        found = [
            self._rows(self._rank, (r := (self._rank + hop) % self._n), r, stage, hop) for hop in self._hops
        ]
        return tuple(each[1] for each in found if each is not None)


class PassedOver(NamedTuple):
    """A layout and an exchange that were not chosen, how long a call with them would take, and the bytes of buffers
    of the fullest rank."""

    layout: TokenLayout
    exchange: Exchange
    prediction: "Prediction"
    buffer_bytes: int


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionPlan(PickledByFields):
    """A plan for `inner * outer` ranks; rank r is member `r % inner` of group `r // inner`.

    >>> plan = plan_attention(seq_len=999, ranks=2, layout="contiguous", exchange="ring")
    >>> plan.num_ranks, plan.layout, plan.exchange
    (2, Contiguous(), Ring())
    >>> [stats.area for stats in plan.stats()]
    [125250.0, 374250.0]
    """

    axes: SequenceAxes
    inner: int
    outer: int
    mask: Mask
    layout: TokenLayout
    kv_layout: TokenLayout | None  # None: keys are the tokens that queries are, and lie where they do
    exchange: Exchange
    heads: HeadSizes
    cluster: Cluster
    rows: tuple[RowPlan, ...]
    passed_over: "tuple[PassedOver, ...]" = ()  # what was compared with this plan, by time

    @property
    def num_ranks(self) -> int:
        """The ranks of all groups together."""
        return self.inner * self.outer

    @property
    def seq_len(self) -> int:
        """How many queries there are: the tokens of the sequence."""
        return self.axes.seq_len

    @property
    def kv_len(self) -> int:
        """How many keys there are: as many as queries, unless they are other tokens."""
        return self.axes.kv_len

    @property
    def q_offset(self) -> int:
        """The position of the first query among the keys."""
        return self.axes.q_offset

    @functools.cached_property
    def digest(self) -> str:
        """The same for the same plan in every process: who owns, computes and sends what."""
        said = (self.axes, self.inner, self.outer, self.exchange, self.cluster)
        found = hashlib.blake2b(repr(said).encode(), digest_size=8)
        for row in self.rows:
            found.update(repr((row.ownership.stride, row.shares)).encode())
            sides = [(row.ownership, row.schedule.ownership)]
            if row.kv_ownership is not row.ownership:
                sides.append((row.kv_ownership, row.schedule.kv_ownership))
            for array in (*(owned.table for side in sides for owned in side), row.schedule.rows):
                found.update(array.tobytes())
        return found.hexdigest()

    def stats(self) -> "tuple[RankStats, ...]":
        """Figures for each rank, summed over the batch rows of the plan."""
        from longmesh.attention.plan.stats import rank_stats

        return rank_stats(self)

    def predict(self) -> "Prediction":
        """How long a call takes on the plan's cluster, forward and backward, for a batch of one."""
        from longmesh.attention.plan.predict import predict

        return predict(self)

    def explain(self) -> str:
        """The plan in words: who computes what, what travels when, balance, bytes, memory."""
        from longmesh.attention.plan.explain import explain

        return explain(self)
