"""What a plan costs, for each rank: exact counts, forward pass, one sequence of the batch for each row.

What a token of each kind weighs is in `head_sizes`.

`received_tokens` is all that a rank receives in keys' worth: received bytes over the bytes of a key
and its value in all heads. Backward receives the keys again, or saves them, and sends as much
gradient home in fp32.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from longmesh.attention.exchange.base import hop_of
from longmesh.attention.exchange.fragment import OWNER, RANK, STAGE, START, STOP
from longmesh.attention.mask.slices import area
from longmesh.attention.plan import merge_tiles as tile
from longmesh.attention.plan.attention_plan import AttentionPlan, RowPlan
from longmesh.attention.plan.intervals import covered_before
from longmesh.attention.plan.schedule import Schedule


class RankStats(NamedTuple):
    """`area` counts pairs, in all heads' worth: half the heads on a pair count a half.

    >>> plan = plan_attention(seq_len=1000, ranks=2, layout="contiguous", exchange="sparse")
    >>> [(stats.tokens, stats.area, stats.received_tokens) for stats in plan.stats()]
    [(500, 125250.0, 0.0), (500, 375250.0, 500.0)]
    """

    rank: int
    tokens: int
    kv_tokens: int
    area: float
    received_tokens: float
    sent_bytes: int
    received_bytes: int
    peak_kv_bytes: int
    kernel_calls: int


def rank_stats(plan: AttentionPlan, ranks: Sequence[int] | None = None) -> tuple[RankStats, ...]:
    """One `RankStats` for each rank, or for each of some, which takes no look at the others."""
    shown = range(plan.num_ranks) if ranks is None else ranks
    total = sum(_row_figures(plan, row, ranks) for row in plan.rows)
    out: list[RankStats] = []
    for rank, (tokens, keys, pairs, sent, received, peak, calls) in zip(
        shown, np.asarray(total).tolist(), strict=True
    ):
        out.append(
            RankStats(
                rank=rank,
                tokens=int(tokens),
                kv_tokens=int(keys),
                area=pairs,
                received_tokens=received / plan.heads.key_bytes,
                sent_bytes=int(sent),
                received_bytes=int(received),
                peak_kv_bytes=int(peak),
                kernel_calls=int(calls),
            )
        )
    return tuple(out)


class GroupFigures(NamedTuple):
    """What a group of ranks computes and sends, in pairs, calls and tokens. `arrives` and `leaves`: keys, queries,
    partial results; `held`: the most key rows alive at once besides its own."""

    pairs: float
    calls: int
    arrives: np.ndarray
    leaves: np.ndarray
    held: int


def _all_groups(row: RowPlan) -> list[GroupFigures]:
    """The figures of every group, found together."""
    tiles, groups = row.schedule.all_tiles, row.schedule.ownership.num_ranks
    pairs = np.bincount(tiles[:, tile.RANK], weights=area(tiles), minlength=groups)
    calls = np.bincount(tiles[:, tile.RANK], minlength=groups)
    return list(map(GroupFigures, pairs, calls, *traffic(row), peak_stage_rows(row)))


def _one_group(row: RowPlan, group: int) -> GroupFigures:
    """The figures of one group among many."""
    s = row.schedule
    tiles, f = s.tiles(group), s.received(group)
    there, home = s.queries[:, RANK] == group, s.queries[:, OWNER] == group
    size = s.queries[:, STOP] - s.queries[:, START]
    moved = int(size[there].sum()), int(size[home].sum())
    sent = sent_fragments(s, group)
    rows, leaving = (int((x[:, STOP] - x[:, START]).sum()) for x in (f, sent))
    arrives, leaves = np.array([rows, *moved]), np.array([leaving, *moved[::-1]])
    return GroupFigures(float(area(tiles).sum()), len(tiles), arrives, leaves, _held_rows(row, group))


def sent_fragments(s: Schedule, group: int) -> np.ndarray:
    """The fragments of keys that a group sends: of its own shard, or of what it holds and passes on."""
    n, hops = s.ownership.num_ranks, s.exchange.hops
    if not hops:
        return s.lent(group)
    parts: list[np.ndarray] = []
    for to in sorted({(group + hop) % n for hop in hops}):
        f = s.received(to)
        came = hop_of(hops, f[:, RANK], f[:, STAGE], f[:, OWNER], n)
        parts.append(f[(to - came) % n == group])
    return np.concatenate(parts)


def _held_rows(row: RowPlan, group: int) -> int:
    """The most key rows of others that a group holds at once: a stage's, and the next one's."""
    s = row.schedule
    f = s.received(group)
    held = np.bincount(f[:, STAGE], weights=f[:, STOP] - f[:, START], minlength=s.num_stages + 1)
    return int((held[:-1] + held[1:]).max())


def buffer_bytes(plan: AttentionPlan, row: RowPlan, rank: int) -> int:
    """The most bytes that a rank holds at once besides its own tokens: keys that arrived, queries that it computes for
    others with their results, and what split heads are swapped into."""
    s, heads, group = row.schedule, plan.heads, rank // plan.inner
    mine = heads_of(plan, row, rank)
    far = s.queries_of(group)
    elements = _held_rows(row, group) * max(mine.kv_heads_of_groups) * heads.kv_dim
    away = int((far[:, STOP] - far[:, START]).sum()) * mine.heads
    wide = away * (heads.v_head_dim + 1) * heads.wide_bytes
    elements += away * heads.head_dim
    if row.shares:
        elements += s.ownership.counts[group] * mine.heads * (heads.head_dim + heads.v_head_dim)
        elements += s.kv_ownership.counts[group] * mine.kv_heads * heads.kv_dim
    return elements * heads.dtype_bytes + wide


def _row_figures(plan: AttentionPlan, row: RowPlan, ranks: Sequence[int] | None) -> np.ndarray:
    """Columns tokens, keys, area, sent, received, peak, calls; a row for each rank, or for each of some."""
    heads = plan.heads
    found = _all_groups(row) if ranks is None else {}
    shown = range(plan.num_ranks) if ranks is None else ranks
    out = np.zeros((len(shown), 7))
    for place, rank in enumerate(shown):
        group = rank // plan.inner
        figures = found[group] if isinstance(found, list) else _one_group(row, group)
        mine = heads_of(plan, row, rank)
        key_bytes = heads.kv_dim * heads.dtype_bytes
        # Between groups of ranks a key head travels with each group of heads that reads it.
        key, query = sum(mine.kv_heads_of_groups) * key_bytes, mine.heads * heads.head_dim * heads.dtype_bytes
        result = mine.heads * (heads.v_head_dim + 1) * heads.wide_bytes
        received = figures.arrives @ (key, query, result)
        sent = figures.leaves @ (key, query, result)
        if row.shares:
            swapped = swapped_elements(plan, row, rank)
            received += (swapped.qkv_in + swapped.output_back) * heads.dtype_bytes
            sent += (swapped.qkv_back + swapped.output_in) * heads.dtype_bytes
        own = row.schedule.kv_ownership.counts[group] * mine.kv_heads
        out[place] = (
            row.ownership.counts[rank],
            row.kv_ownership.counts[rank],
            figures.pairs * mine.heads / heads.num_heads,
            sent,
            received,
            (own + figures.held * max(mine.kv_heads_of_groups)) * key_bytes,
            figures.calls * mine.calls,
        )
    return out


def traffic(row: RowPlan) -> tuple[np.ndarray, np.ndarray]:
    """For each group, tokens that arrive and leave: keys, queries, partial results."""
    s = row.schedule
    groups = s.ownership.num_ranks
    arrives, leaves = np.zeros((2, groups, 3))
    kept = s.all_stretches
    np.add.at(arrives[:, 0], kept.rank, kept.stop - kept.start)
    table = s.kv_ownership.table
    if s.exchange.hops:
        f = np.concatenate([s.received(group) for group in range(groups)])
        came = hop_of(s.exchange.hops, f[:, RANK], f[:, STAGE], f[:, OWNER], groups)
        np.add.at(leaves[:, 0], (f[:, RANK] - came) % groups, f[:, STOP] - f[:, START])
    else:
        wanted = covered_before(kept.start, kept.stop, table[:, 1]) - covered_before(
            kept.start, kept.stop, table[:, 0]
        )
        np.add.at(leaves[:, 0], table[:, 2], wanted)
    size = s.queries[:, STOP] - s.queries[:, START]
    for there, back, column in ((RANK, OWNER, 1), (OWNER, RANK, 2)):
        np.add.at(arrives[:, column], s.queries[:, there], size)
        np.add.at(leaves[:, column], s.queries[:, back], size)
    return arrives, leaves


def peak_stage_rows(row: RowPlan) -> np.ndarray:
    """For each group, the most key rows alive at once besides its own: a stage's, and the next one's."""
    s = row.schedule
    kept = s.all_stretches
    held = np.zeros((s.ownership.num_ranks, s.num_stages + 1), dtype=np.int64)
    np.add.at(held, (kept.rank, kept.stage), kept.stop - kept.start)
    return (held[:, :-1] + held[:, 1:]).max(axis=1)


class RankHeads(NamedTuple):
    """The heads of one rank: how many, in how many kernel calls a block, and the key heads of each group."""

    heads: int
    kv_heads: int
    kv_heads_of_groups: tuple[int, ...]
    calls: int


def heads_of(plan: AttentionPlan, row: RowPlan, rank: int) -> RankHeads:
    if not row.shares:
        kv_heads = plan.heads.num_kv_heads
        return RankHeads(plan.heads.num_heads, kv_heads, (kv_heads,), 1)
    share = row.shares[rank % plan.inner]
    by_group = tuple(group.kv_stop - group.kv_start for group in share.groups)
    return RankHeads(share.q_stop - share.q_start, share.kv_stop - share.kv_start, by_group, len(share.parts))


class Swapped(NamedTuple):
    """Elements that one rank receives when shards of the sequence become shards of heads, and results go back.

    `qkv_in` and `output_in`: of its own heads, of others' tokens. `output_back` and `qkv_back`: of others' heads, of
    its own tokens.
    """

    qkv_in: int
    output_in: int
    output_back: int
    qkv_back: int


def swapped_elements(plan: AttentionPlan, row: RowPlan, rank: int) -> Swapped:
    """What the all-to-alls of split heads bring to a rank."""
    first = rank // plan.inner * plan.inner
    tokens, keys, heads = row.ownership.counts, row.kv_ownership.counts, plan.heads
    mine = heads_of(plan, row, rank)
    peers = [peer for peer in range(first, first + plan.inner) if peer != rank]
    theirs = [heads_of(plan, row, peer) for peer in peers]
    others, other_keys = (sum(counts[peer] for peer in peers) for counts in (tokens, keys))
    their_heads, their_kv_heads = sum(x.heads for x in theirs), sum(x.kv_heads for x in theirs)
    return Swapped(
        qkv_in=others * mine.heads * heads.head_dim + other_keys * mine.kv_heads * heads.kv_dim,
        output_in=others * mine.heads * heads.v_head_dim,
        output_back=tokens[rank] * their_heads * heads.v_head_dim,
        qkv_back=tokens[rank] * their_heads * heads.head_dim + keys[rank] * their_kv_heads * heads.kv_dim,
    )
