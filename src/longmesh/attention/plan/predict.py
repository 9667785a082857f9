"""How long a plan takes on its cluster, forward and backward: what `auto` compares and `explain()` shows.

    compute   | stage 0 | stage 1    | stage 2 |      a stage takes the longer of computing it and bringing the next;
    transfer  | stage 1   | stage 2 |                 `Cluster.overlap` says how much of the shorter one really hides

What travels is packed and put in its place besides, which hides behind nothing. Backward is the same walk with its own
rates; keys come again, and the gradients of a stage go home in fp32 while the next is computed. Heads that are split
are swapped group by group around that.

A call takes as long as its slowest rank; where ranks share cores (`Cluster.crowding`), as long as their work added up.
On more than MANY ranks only some are looked at: the one with the most pairs, the one that receives most, and others at
equal distances.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from longmesh.attention.exchange.fragment import OWNER, RANK, STAGE, START, STOP
from longmesh.attention.mask.block import UNBOUNDED
from longmesh.attention.mask.slices import HI, K0, K1, LO, Q0, Q1, area
from longmesh.attention.plan import merge_tiles as tile
from longmesh.attention.plan.attention_plan import AttentionPlan, RowPlan
from longmesh.attention.plan.schedule import WHO, Schedule
from longmesh.attention.plan.stats import heads_of, swapped_elements
from longmesh.plan.rate import RateOp, TileKind

Array = np.ndarray
MANY = 32  # ranks, up to which every one is looked at
SOME = 8  # of those at equal distances, where there are more
AS_FAST = 1.01  # times the best: predictions are no better than this, and ranks must not differ by a rounding
DTYPES = {2: "bfloat16", 4: "float32", 8: "float64"}
FLOPS: dict[RateOp, int] = {"attention": 4, "attention_backward": 10}  # a pair and element of the head dim


class Times(NamedTuple):
    """Microseconds of a pass on its slowest rank, and those that the busiest rank computes; the rest is waiting and
    packing."""

    total_us: float
    compute_us: float


class Prediction(NamedTuple):
    """Predicted times of one call with a batch of one."""

    forward: Times
    backward: Times

    @property
    def total_us(self) -> float:
        return self.forward.total_us + self.backward.total_us


@functools.lru_cache(maxsize=512)
def predict(plan: AttentionPlan) -> Prediction:
    """The times of the slowest rank, summed over the batch rows of the plan."""
    passes = [[_slowest(plan, row, op) for row in plan.rows] for op in FLOPS]
    forward, backward = (Times(*map(sum, zip(*rows, strict=True))) for rows in passes)
    return Prediction(forward, backward)


def _slowest(plan: AttentionPlan, row: RowPlan, op: RateOp) -> Times:
    groups = ranks_to_look_at(row.schedule)
    totals, computes = zip(*(_rank_times(plan, row, op, group) for group in groups), strict=True)
    crowding = plan.cluster.crowding
    # Rates are those of ranks that all compute: one whose peers wait is faster by as much as they crowd it.
    return Times(*(max(max(times) / crowding, sum(times) / len(times)) for times in (totals, computes)))


def ranks_to_look_at(s: Schedule) -> list[int]:
    """Every rank, or some of many: the same on every rank."""
    n = s.ownership.num_ranks
    if n <= MANY:
        return list(range(n))
    load = np.bincount(s.rows[:, WHO], weights=area(s.rows), minlength=n)
    extremes = (int(load.argmax()), int(s.needs.remote_tokens.argmax()))
    return sorted({*extremes, *(n * i // SOME for i in range(SOME)), n - 1})


def _rank_times(plan: AttentionPlan, row: RowPlan, op: RateOp, group: int) -> Times:
    """One group's time, that of its first member: they have about as many heads each."""
    mine = heads_of(plan, row, group * plan.inner)
    compute = compute_us(plan, row, op, group, mine.heads, mine.calls)
    backward = op == "attention_backward"
    kv_heads = sum(mine.kv_heads_of_groups)
    total = _walk(compute, _key_transfers(plan, row, group, kv_heads, backward), plan.cluster.overlap)
    passes = len(row.shares[0].groups) if row.shares else 1  # over the stages: one for each group of heads
    total += plan.cluster.pass_us * passes + _waits_us(plan, row, backward)
    total += packing_us(plan, row, group, mine.heads, kv_heads, backward)
    total += _query_transfers(plan, row, group, mine.heads, backward)
    if row.shares:
        total = _with_swaps(plan, row, group * plan.inner, total, backward)
    return Times(total, float(compute.sum()))


def _walk(compute: Array, bring: Array, overlap: float) -> float:
    """Stages, each computed while the next one's keys come (`bring[i]` arrives for stage i)."""
    coming = np.append(bring[1:], 0.0)
    return float((compute + coming - overlap * np.minimum(compute, coming)).sum())


def compute_us(plan: AttentionPlan, row: RowPlan, op: RateOp, group: int, heads: int, calls: int) -> Array:
    """By stage, the time of a group's kernels for `heads` heads; `calls`: kernel calls that each block takes."""
    cluster, sizes = plan.cluster, plan.heads
    dtype = DTYPES.get(sizes.dtype_bytes, "float32")
    tiles = row.schedule.tiles(group)
    took = np.full(len(tiles), cluster.call_us * calls)
    flops = FLOPS[op] * heads * (sizes.head_dim + sizes.v_head_dim) / 2
    for part in parts_of(tiles):
        if part.pairs.any():
            rates = cluster.rates_of(op, dtype, part.kind)
            took += flops * part.pairs / rates.flops_per_us(part.rows, part.keys)
            if rates.has_fixed:
                took += part.calls * calls * rates.fixed_us(part.rows, part.keys)
    return np.bincount(tiles[:, tile.STAGE], weights=took, minlength=row.schedule.num_stages)


class TileParts(NamedTuple):
    """Of each tile, how many pairs are of a kind, the sizes that their rate goes by, and 1 if it takes a call for
    them."""

    kind: TileKind
    pairs: Array
    rows: Array
    keys: Array
    calls: Array


def parts_of(tiles: Array) -> list[TileParts]:
    """Tiles as rectangles, triangles and windows. A tile with one edge is a triangle beside a rectangle."""
    edges = (tiles[:, LO] != -UNBOUNDED).astype(int) + (tiles[:, HI] != UNBOUNDED)
    rows, keys = tiles[:, Q1] - tiles[:, Q0], tiles[:, K1] - tiles[:, K0]
    pairs = area(tiles).astype(float)
    # The pairs that a triangle of this side lacks to be a square are those that the tile lacks.
    side = np.where(edges == 1, (1 + np.sqrt(1 + 8 * (rows * keys - pairs))) / 2, 0.0)
    triangle = side * (side + 1) / 2
    width = np.where(edges == 2, (tiles[:, HI] - tiles[:, LO] + 1).astype(float), 0.0)
    width = np.minimum(width, keys)
    full = np.where(edges == 2, 0.0, np.maximum(pairs - triangle, 0.0))
    return [
        TileParts("full", full, rows, keys, edges == 0),
        TileParts("causal", triangle, side, side, edges == 1),
        TileParts("window", np.where(edges == 2, pairs, 0.0), width, width, edges == 2),
    ]


def _key_transfers(plan: AttentionPlan, row: RowPlan, group: int, kv_heads: int, backward: bool) -> Array:
    """By stage, the time in which its keys and values come, and in backward gradients of as many go home."""
    s, cluster = row.schedule, plan.cluster
    f = s.received(group)
    element = kv_heads * plan.heads.kv_dim
    rows = (f[:, STOP] - f[:, START]).astype(float)
    took = np.zeros(s.num_stages)
    way, peers = s.exchange.transport, s.exchange.num_peers(s.ownership.num_ranks)
    sizes = [plan.heads.dtype_bytes] + [plan.heads.wide_bytes] * backward
    for level, near in _by_level(plan, s, group, f[:, OWNER]):
        arrived = np.bincount(f[near, STAGE], weights=rows[near], minlength=s.num_stages)
        link = cluster.levels[level].link_of(way)
        # Links of different levels carry at the same time.
        parts = [link.times_us(arrived * element * size, peers) for size in sizes]
        took = np.maximum(took, np.where(arrived > 0, sum(parts), 0.0))
    if s.last_stage:  # a collective of every rank, though this one receives nothing
        least = cluster.levels[_outermost(plan, s)].link_of(way).time_us(0, peers) * len(sizes)
        took[1 : s.last_stage + 1] = np.maximum(took[1 : s.last_stage + 1], least)
    return took


def _waits_us(plan: AttentionPlan, row: RowPlan, backward: bool) -> float:
    """What transfers cost besides their links, for each peer: keys of each stage, and gradients; queries there and
    back; of split heads the first group's way and the last one's."""
    s = row.schedule
    others = s.ownership.num_ranks - 1
    count = s.last_stage * (1 + backward) * s.exchange.num_peers(s.ownership.num_ranks)
    count += 2 * (len(s.queries) > 0) * others + 2 * (plan.inner - 1)
    return count * plan.cluster.transfer_us


def packing_us(
    plan: AttentionPlan, row: RowPlan, group: int, heads: int, kv_heads: int, backward: bool
) -> float:
    """Copies of keys that travel and of their gradients, and what is written as 0 to add gradients to."""
    s, sizes = row.schedule, plan.heads
    f = s.received(group)
    element = kv_heads * sizes.kv_dim
    keys = element * sizes.dtype_bytes  # bytes of a key with its value
    grads = element * sizes.wide_bytes
    own = s.kv_ownership.counts[group]
    arrived = np.bincount(f[:, STAGE], weights=f[:, STOP] - f[:, START], minlength=s.num_stages)
    copied = [own * keys] if s.last_stage else []
    # Rows of one owner, or of one after the other, arrive in their place; what goes to the owners as gradients is taken
    # from there.
    after = (f[1:, STAGE] == f[:-1, STAGE]) & (f[1:, OWNER] < f[:-1, OWNER])
    placed = int(after.any())
    copied += [rows * keys for rows in _taken(s, group)] + [rows * keys for rows in arrived] * placed
    if backward:
        copied += [own * grads, s.ownership.counts[group] * heads * sizes.head_dim * sizes.wide_bytes]
        copied += [rows * grads for rows in arrived] * (2 + placed)
    link = plan.cluster.levels[0].link
    return float(sum(link.time_us(size) for size in copied if size))


def _taken(s: Schedule, group: int) -> list[float]:
    """By stage, the rows that a group must gather before it sends them: those that do not lie in the order in which
    they go out. Of many groups all that arrives is taken for such."""
    if s.exchange.hops or not s.last_stage:
        return []
    many = s.ownership.num_ranks > MANY
    f = s.received(group) if many else s.lent(group)
    f = f[np.lexsort((np.arange(len(f)), f[:, RANK], f[:, STAGE]))]
    rows = np.bincount(f[:, STAGE], weights=f[:, STOP] - f[:, START], minlength=s.num_stages)
    apart = (f[1:, STAGE] == f[:-1, STAGE]) & (f[1:, START] != f[:-1, STOP])
    gathered = np.bincount(f[1:, STAGE], weights=apart, minlength=s.num_stages) > 0
    return rows[gathered | many].tolist()


def _outermost(plan: AttentionPlan, s: Schedule) -> int:
    """The level over which the whole group of owners talks."""
    level = plan.cluster.level_of((s.ownership.num_ranks, plan.inner), (0,))
    return plan.cluster.levels.index(level)


def _by_level(plan: AttentionPlan, s: Schedule, group: int, owner: Array) -> list[tuple[int, Array]]:
    """Which owners are reached over which level. A ring runs at the pace of its slowest link."""
    outermost = _outermost(plan, s)
    if s.exchange.hops or plan.cluster.is_uniform or outermost == 1:
        return [(outermost, np.ones(len(owner), dtype=bool))]
    found: list[tuple[int, Array]] = []
    reached = np.zeros(len(owner), dtype=bool)
    for number in range(1, outermost + 1):
        ranks = plan.cluster.levels[number].ranks
        near = np.ones(len(owner), dtype=bool)
        if ranks is not None and number < outermost:
            near = owner * plan.inner // ranks == group * plan.inner // ranks
        found.append((number, near & ~reached))
        reached |= near
    return found


def _query_transfers(plan: AttentionPlan, row: RowPlan, group: int, heads: int, backward: bool) -> float:
    """Queries that are computed away from home: there with stage 1, their results back at the end."""
    s = row.schedule
    if not len(s.queries):
        return 0.0
    size = s.queries[:, STOP] - s.queries[:, START]
    there, home = (float(size[s.queries[:, column] == group].sum()) for column in (RANK, OWNER))
    sizes = plan.heads
    element, wide = sizes.head_dim * sizes.dtype_bytes, (sizes.v_head_dim + 1) * sizes.wide_bytes
    # Forward: queries go, results and their log-sum-exp come; backward: out, dout and lse go, dq comes.
    going, coming = (2 * wide, sizes.head_dim * sizes.wide_bytes) if backward else (element, wide)
    link = plan.cluster.levels[_outermost(plan, s)].link_of("all_to_all")
    peers = s.ownership.num_ranks - 1
    took = link.time_us(there * heads * going, peers) + link.time_us(home * heads * coming, peers)
    copied = 2 * heads * (there * going + home * coming)
    return took + plan.cluster.levels[0].link.time_us(copied)


def _with_swaps(plan: AttentionPlan, row: RowPlan, rank: int, attend_us: float, backward: bool) -> float:
    """With the all-to-alls of split heads: what a group of heads brings and takes overlaps with the others' attention.

    What travels is packed and unpacked besides, which overlaps with nothing.
    """
    assert row.shares is not None, "heads are split"
    groups = len(row.shares[0].groups)
    cluster = plan.cluster
    swapped = swapped_elements(plan, row, rank)
    narrow, wide = plan.heads.dtype_bytes, plan.heads.wide_bytes
    # Forward: q, k and v come, the output goes back. Backward: its gradient comes, those of q, k and v go back.
    coming = (swapped.output_in if backward else swapped.qkv_in) * narrow
    going = swapped.qkv_back * wide if backward else swapped.output_back * narrow
    link = cluster.level_of((plan.outer, plan.inner), (1,)).link_of("all_to_all")
    each = [link.time_us(size / groups, plan.inner - 1) for size in (coming, going)]
    # A rank's own part travels with the others', as a copy. What comes is packed and placed; what goes back is packed
    # and added to 0s. Tokens that are not adjacent in the group's buffers are put there, and gathered, one by one: that
    # takes twice a copy's time.
    peers = max(1, plan.inner - 1)
    one_by_one = len(row.ownership.pieces_of(rank)) > 1
    memory = cluster.levels[0].link
    packing = sum(
        times * memory.time_us(size * plan.inner / peers) + memory.time_us(size / peers)
        for size, times in ((coming, 2 + one_by_one), (going, 3 + 2 * one_by_one))
    )
    hidden = cluster.overlap * min(attend_us, sum(each) * groups) * (groups - 1) / groups
    return attend_us + sum(each) * groups + packing - hidden
