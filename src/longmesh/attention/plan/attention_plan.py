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

from longmesh.attention.exchange.base import Exchange
from longmesh.attention.exchange.fragment import AT, OWNER, RANK, STAGE, START, STOP
from longmesh.attention.exchange.ulysses import HeadShare
from longmesh.attention.layout.base import Layout, Ownership
from longmesh.attention.mask.base import Mask
from longmesh.attention.mask.block import Block
from longmesh.attention.plan.schedule import Schedule

if TYPE_CHECKING:
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
    shard, or with `relay` its buffer of the stage before. A `local` stage's buffer is the own shard.

    >>> plan = plan_attention(seq_len=8, ranks=2, layout="contiguous", exchange="sparse")
    >>> own, arrived = plan.rows[0].rank(1).stages
    >>> own.local, arrived.kv_rows, len(arrived.blocks)
    (True, 4, 1)
    """

    kv: tuple[Rows, ...]
    kv_rows: int
    receives: tuple[Rows, ...]
    sends: tuple[Rows, ...]
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
    query_rows: int
    queries_in: tuple[Rows, ...]
    queries_out: tuple[Rows, ...]
    stages: tuple[Stage, ...]
    heads: HeadShare | None


@dataclasses.dataclass(frozen=True, eq=False)
class RowPlan:
    """The plan of one batch row: `ownership` cuts tokens over all ranks, `schedule` runs on groups of
    `inner` ranks (one rank each, unless heads are split).

    >>> row = plan_attention(seq_len=8, ranks=2, layout="zigzag", exchange="ring").rows[0]
    >>> row.positions(0), row.positions(1)
    (array([0, 1, 6, 7]), array([2, 3, 4, 5]))
    """

    ownership: Ownership
    schedule: Schedule
    inner: int
    shares: tuple[HeadShare, ...] | None

    def positions(self, rank: int) -> np.ndarray:
        """Global positions of the rank's tokens, in local order."""
        return self.ownership.positions(rank)

    def group_positions(self, rank: int) -> np.ndarray:
        """Global positions of the rows of the group's query and own key buffer, remote queries included."""
        owned, group = self.schedule.ownership, rank // self.inner
        far = self.schedule.queries[self.schedule.queries[:, RANK] == group]
        spans = [np.arange(f[AT], f[AT] + f[STOP] - f[START]) for f in far]
        return owned.token_of(np.concatenate([owned.coordinates(group), *spans]))

    def stage_positions(self, rank: int, stage: int) -> np.ndarray:
        """Global positions of the rows of a stage's key buffer."""
        owned, group = self.schedule.ownership, rank // self.inner
        if self.rank(rank).stages[stage].local:
            return owned.positions(group)
        f = self.schedule.fragments
        f = f[(f[:, RANK] == group) & (f[:, STAGE] == stage)]
        spans = [
            np.arange(at, at + size) for at, size in zip(f[:, AT], f[:, STOP] - f[:, START], strict=True)
        ]
        return owned.token_of(np.concatenate(spans) if spans else np.zeros(0, dtype=np.int64))

    def group_rows(self, rank: int) -> np.ndarray:
        """For each of the rank's tokens, its row in the group's buffers."""
        owned = self.schedule.ownership
        place = np.empty(owned.seq_len, dtype=np.int64)
        mine = owned.positions(rank // self.inner)
        place[mine] = np.arange(len(mine))
        return place[self.positions(rank)]

    @functools.cache  # noqa: B019 (a plan lives as long as its cache entry)
    def rank(self, rank: int) -> RankPlan:
        """What one rank does."""
        s, group = self.schedule, rank // self.inner
        return RankPlan(
            rank=rank,
            group=group,
            tokens=self.ownership.counts[rank],
            query_rows=s.ownership.counts[group] + _size(s.queries[s.queries[:, RANK] == group]),
            queries_in=_rows(s.queries[s.queries[:, RANK] == group], OWNER),
            queries_out=_rows(s.queries[s.queries[:, OWNER] == group], RANK),
            stages=tuple(_stage(s, group, stage) for stage in range(s.num_stages)),
            heads=self.shares[rank % self.inner] if self.shares else None,
        )


def _size(fragments: np.ndarray) -> int:
    return int((fragments[:, STOP] - fragments[:, START]).sum())


def _rows(fragments: np.ndarray, peer: int) -> tuple[Rows, ...]:
    return tuple(map(Rows._make, fragments[:, [peer, START, STOP]].tolist()))


def _stage(s: Schedule, rank: int, stage: int) -> Stage:
    tiles = s.tiles[(s.tiles[:, 0] == rank) & (s.tiles[:, 1] == stage), 2:]
    blocks = tuple(Block(*tile[:6], elementwise=bool(tile[6])) for tile in tiles.tolist())
    now = s.fragments[s.fragments[:, STAGE] == stage]
    mine, others = now[now[:, RANK] == rank], now[now[:, OWNER] == rank]
    if s.is_local(stage):
        own = s.ownership.counts[rank]
        return Stage((Rows(rank, 0, own),), own, (), (), blocks, local=True, relay=False)
    receives, sends = _rows(mine, OWNER), _rows(others, RANK)
    if s.relay:
        n = s.ownership.num_ranks
        receives = _relayed(s, rank, stage)
        sends = tuple(
            Rows((rank + 1) % n, start, stop) for _, start, stop in _relayed(s, (rank + 1) % n, stage)
        )
    return Stage(_rows(mine, OWNER), _size(mine), receives, sends, blocks, local=False, relay=s.relay)


def _relayed(s: Schedule, rank: int, stage: int) -> tuple[Rows, ...]:
    """Rows of the buffer that the rank before held one stage ago."""
    before = (rank - 1) % s.ownership.num_ranks
    f = s.fragments
    now = f[(f[:, RANK] == rank) & (f[:, STAGE] == stage)]
    if len(now) == 0:
        return ()
    held_from = 0
    if stage > 1:
        held = f[(f[:, RANK] == before) & (f[:, STAGE] == stage - 1)]
        held_from = int(held[:, START].min())
    return (Rows(before, int(now[:, START].min()) - held_from, int(now[:, STOP].max()) - held_from),)


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionPlan:
    """A plan for `inner * outer` ranks; rank r is member `r % inner` of group `r // inner`.

    >>> plan = plan_attention(seq_len=999, ranks=2, layout="contiguous", exchange="ring")
    >>> plan.num_ranks, plan.layout, plan.exchange
    (2, Contiguous(), Ring())
    >>> [stats.area for stats in plan.stats()]
    [125250.0, 374250.0]
    """

    seq_len: int
    inner: int
    outer: int
    mask: Mask
    layout: Layout
    exchange: Exchange
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int
    rows: tuple[RowPlan, ...]

    @property
    def num_ranks(self) -> int:
        """The ranks of all groups together."""
        return self.inner * self.outer

    @functools.cached_property
    def digest(self) -> str:
        """The same for the same plan in every process: who owns, computes and sends what."""
        found = hashlib.blake2b(f"{self.seq_len} {self.inner} {self.outer}".encode(), digest_size=8)
        for row in self.rows:
            s = row.schedule
            found.update(repr((row.ownership.pieces, row.ownership.stride, row.shares)).encode())
            for array in (s.fragments, s.queries, s.tiles):
                found.update(array.tobytes())
        return found.hexdigest()

    def stats(self) -> "tuple[RankStats, ...]":
        """Figures for each rank, summed over the batch rows of the plan."""
        from longmesh.attention.plan.stats import rank_stats

        return rank_stats(self)

    def explain(self) -> str:
        """The plan in words: who computes what, what travels when, balance, bytes, memory."""
        from longmesh.attention.plan.explain import explain

        return explain(self)
