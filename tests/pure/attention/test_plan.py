"""A plan carried out on simulated ranks, in one process, with token numbers as the data that travels.

Every visible pair is computed exactly once, what is sent is what is received, and the plan's own
figures are those of the run.
"""

import dataclasses
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from longmesh.attention import Ownership, RowPlan, Rows, TokenLayout, Ulysses, Workload, masks, plan_attention
from longmesh.attention.exchange.named import EXCHANGES
from longmesh.attention.exchange.ulysses import share_heads
from longmesh.attention.layout.named import LAYOUTS
from longmesh.attention.plan.attention_plan import AttentionPlan
from longmesh.errors import LongmeshError
from support.exchanges import OF_KEYS, ON_ONE_AXIS, ON_TWO_AXES
from tests.pure.attention.test_masks import any_mask, dense, dense_on


class Simulated:
    """Groups (ranks, unless heads are split) that hold the numbers of their tokens, as queries and as keys."""

    def __init__(self, row: RowPlan, num_groups: int):
        self.row = row
        self.plans = [row.rank(group * row.inner) for group in range(num_groups)]
        self.tokens = [row.schedule.ownership.positions(group) for group in range(num_groups)]
        self.shards = [row.schedule.kv_ownership.positions(group) for group in range(num_groups)]
        self.pairs = np.zeros((row.ownership.seq_len, row.kv_ownership.seq_len), dtype=int)
        self.area = np.zeros(num_groups)
        self.keys_received = np.zeros(num_groups, dtype=int)
        self.calls = np.zeros(num_groups, dtype=int)

    def run(self, seen: np.ndarray) -> None:
        queries = [
            np.concatenate([own, *(self.tokens[r][a:b] for r, a, b in plan.queries_in)])
            for plan, own in zip(self.plans, self.tokens, strict=True)
        ]
        buffers = self.shards
        for stage in range(len(self.plans[0].stages)):
            buffers = [self.receive(group, stage, buffers) for group in range(len(self.plans))]
            for group, plan in enumerate(self.plans):
                for block in plan.stages[stage].blocks:
                    self.compute(group, block, queries[group], buffers[group], seen)

    def receive(self, group: int, number: int, before: list[np.ndarray]) -> np.ndarray:
        stage = self.plans[group].stages[number]
        if stage.local:
            return self.shards[group]
        for peer, start, stop in stage.receives:
            assert Rows(group, start, stop) in self.plans[peer].stages[number].sends
            assert peer != group
        source = before if stage.relay else self.shards
        empty = [np.zeros(0, dtype=int)]
        buffer = np.concatenate(empty + [source[r][a:b] for r, a, b in stage.receives])
        home = np.concatenate(empty + [self.shards[r][a:b] for r, a, b in stage.kv])
        assert (
            buffer.tolist()
            == home.tolist()
            == self.row.stage_positions(group * self.row.inner, number).tolist()
        )
        assert len(buffer) == stage.kv_rows
        self.keys_received[group] += len(buffer)
        return buffer

    def compute(self, group: int, block, queries: np.ndarray, keys: np.ndarray, seen: np.ndarray) -> None:
        assert 0 <= block.q_start < block.q_stop <= len(queries)
        assert 0 <= block.k_start < block.k_stop <= len(keys)
        i, j = np.arange(block.q_start, block.q_stop)[:, None], np.arange(block.k_start, block.k_stop)[None]
        inside = (j - i >= block.lo) & (j - i <= block.hi)
        assert inside.any()
        self.area[group] += inside.sum()
        self.calls[group] += 1
        where = np.ix_(queries[block.q_start : block.q_stop], keys[block.k_start : block.k_stop])
        self.pairs[where] += inside & seen[where] if block.elementwise else inside


def carry_out(plan: AttentionPlan) -> list[Simulated]:
    runs = [Simulated(row, plan.outer) for row in plan.rows]
    for number, run in enumerate(runs):
        seen = dense_on(plan.mask, plan.axes, number)
        run.run(seen)
        assert (run.pairs == seen).all()
    return runs


@given(st.data())
@settings(max_examples=200)
def test_every_visible_pair_is_computed_once(data):
    seq_len, ranks = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 7))
    plan = plan_attention(
        seq_len=seq_len,
        ranks=ranks,
        mask=data.draw(any_mask(seq_len)),
        layout=data.draw(st.sampled_from(sorted(LAYOUTS))),
        exchange=data.draw(st.sampled_from(ON_ONE_AXIS)),
        chunk=data.draw(st.integers(1, 9)),
        num_heads=4,
        num_kv_heads=data.draw(st.sampled_from([1, 2, 4])),
    )
    (run,) = carry_out(plan)
    stats = plan.stats()
    assert [s.tokens for s in stats] == list(plan.rows[0].ownership.counts)
    assert sum(s.sent_bytes for s in stats) == sum(s.received_bytes for s in stats)
    assert sum(s.area for s in stats) == pytest.approx(run.area.sum())
    if plan.inner == 1:
        assert [s.area for s in stats] == run.area.tolist()
        assert [s.kernel_calls for s in stats] == run.calls.tolist()
        if not plan.rows[0].ownership.moved:
            assert [s.received_tokens for s in stats] == run.keys_received.tolist()


@given(st.data())
def test_hybrid_on_groups(data):
    seq_len = data.draw(st.integers(1, 40))
    plan = plan_attention(
        seq_len=seq_len,
        ranks=(data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))),
        mask=data.draw(any_mask(seq_len)),
        layout=data.draw(st.sampled_from(sorted(LAYOUTS))),
        exchange=data.draw(st.sampled_from(ON_TWO_AXES)),
        chunk=4,
        num_heads=4,
        num_kv_heads=2,
    )
    carry_out(plan)
    row = plan.rows[0]
    for rank in range(plan.num_ranks):
        owned = row.schedule.ownership.positions(rank // plan.inner)
        assert (owned[row.group_rows(rank)] == row.positions(rank)).all()


@dataclasses.dataclass(frozen=True)
class Given(TokenLayout):
    """A user's own layout."""

    ownership: Ownership

    def assign(self, work: Workload, ranks: int) -> Ownership:
        return self.ownership


@given(st.data())
def test_blocks_computed_away_from_home(data):
    seq_len, ranks = data.draw(st.integers(4, 30)), data.draw(st.integers(2, 4))
    base = LAYOUTS["zigzag"].assign(Workload(masks.full().slices(seq_len), seq_len, 1), ranks)
    cuts = sorted(data.draw(st.lists(st.integers(0, seq_len), min_size=4, max_size=4, unique=True)))
    to = data.draw(st.tuples(*[st.integers(0, ranks - 1)] * 3))
    keys = sorted(data.draw(st.lists(st.integers(0, seq_len), min_size=2, max_size=2, unique=True)))
    moved = tuple((cuts[i], cuts[i + 1], *keys, to[i]) for i in range(3))
    plan = plan_attention(
        seq_len=seq_len,
        ranks=ranks,
        mask=data.draw(any_mask(seq_len)),
        layout=Given(dataclasses.replace(base, moved=moved)),
        exchange=data.draw(st.sampled_from(OF_KEYS)),
    )
    carry_out(plan)
    stats = plan.stats()
    assert sum(s.sent_bytes for s in stats) == sum(s.received_bytes for s in stats)
    row = plan.rows[0]
    for rank in range(ranks):
        mine = row.rank(rank)
        assert len(row.group_positions(rank)) == mine.query_rows
        for peer, start, stop in mine.queries_in:
            assert Rows(rank, start, stop) in row.rank(peer).queries_out


@given(st.data())
@settings(max_examples=60)
def test_solve_moves_work_and_stays_exact(data):
    lengths = data.draw(st.lists(st.integers(1, 500), min_size=1, max_size=6))
    mask = masks.documents(lengths)
    extra = data.draw(
        st.sampled_from([None, masks.sliding_window(70, 20), masks.prefix_lm(1), masks.chunked(200)])
    )
    if extra is not None:
        mask = mask | extra if data.draw(st.booleans()) else mask & extra
    plan = plan_attention(
        seq_len=sum(lengths),
        ranks=data.draw(st.integers(2, 5)),
        mask=mask,
        layout="solve",
        exchange=data.draw(st.sampled_from(["ring", "sparse"])),
        num_kv_heads=data.draw(st.sampled_from([1, 8])),
    )
    (run,) = carry_out(plan)
    assert [s.area for s in plan.stats()] == run.area.tolist()


def test_solve_keeps_its_promises_on_packed_documents():
    balances, shares = [], []
    for seed in range(4):
        rng, lengths, left = np.random.default_rng(seed), [], 1 << 16
        while left:
            lengths.append(min(int((rng.pareto(1.0) + 1) * 300), 1 << 14, left))
            left -= lengths[-1]
        plan = plan_attention(
            seq_len=1 << 16, ranks=8, mask=masks.documents(lengths), layout="solve", exchange="sparse"
        )
        stats = plan.stats()
        assert {s.tokens for s in stats} == {1 << 13}
        balances.append(max(s.area for s in stats) * 8 / sum(s.area for s in stats))
        shares.append(sum(s.received_tokens for s in stats) / (7 << 16))
        assert len(plan.rows[0].ownership.moved) > 0
    assert max(balances) < 1.02
    assert np.mean(shares) < 0.13


def test_a_layout_for_each_batch_row():
    plan = plan_attention(
        seq_len=40,
        ranks=3,
        mask=masks.documents([[30, 10], [5, 35]]),
        layout="per_document",
        exchange="sparse",
    )
    assert len(plan.rows) == 2
    carry_out(plan)
    assert [s.tokens for s in plan.stats()] == [2 * n for n in plan.rows[0].ownership.counts]


@dataclasses.dataclass(frozen=True)
class ByFirstDocument(TokenLayout):
    """The first document to rank 0, the rest to rank 1."""

    def assign(self, work: Workload, ranks: int) -> Ownership:
        cut = int(work.slices[0, 1])
        return Ownership(work.seq_len, (((0, cut),), ((cut, work.seq_len),)))


def test_a_batch_is_one_tensor_so_rows_must_agree_on_their_sizes():
    mask = masks.documents([[7, 4], [1, 10]])
    with pytest.raises(
        LongmeshError, match="ByFirstDocument gives a rank different numbers of tokens in diff"
    ):
        plan_attention(seq_len=11, ranks=2, mask=mask, layout=ByFirstDocument(), exchange="sparse")


def test_one_long_causal_sequence_travels_less_than_head_tail():
    def received(layout: str) -> float:
        plan = plan_attention(seq_len=1 << 14, ranks=8, mask=masks.causal(), layout=layout, exchange="sparse")
        areas = [s.area for s in plan.stats()]
        assert max(areas) * 8 / sum(areas) < 1.02
        return sum(s.received_tokens for s in plan.stats())

    assert received("solve") < 0.75 * received("zigzag")


def test_sparse_receives_the_least_the_layout_allows():
    mask = masks.documents([700, 300, 1000])
    plan = plan_attention(seq_len=2000, ranks=4, mask=mask, layout="zigzag", exchange="sparse")
    seen, row = dense(mask, 2000), plan.rows[0]
    for rank, stats in enumerate(plan.stats()):
        mine = row.positions(rank)
        wanted = set(np.nonzero(seen[mine].any(axis=0))[0].tolist()) - set(mine.tolist())
        assert stats.received_tokens == len(wanted)


def test_a_zigzag_ring_computes_one_block_a_step():
    plan = plan_attention(seq_len=8000, ranks=4, mask=masks.causal(), layout="zigzag", exchange="ring")
    for rank in range(4):
        stages = plan.rows[0].rank(rank).stages
        assert [len(stage.blocks) for stage in stages] == [1, 1, 1, 1]
    assert len({s.area for s in plan.stats()}) == 1
    assert max(s.peak_kv_bytes for s in plan.stats()) == 3 * 2000 * 2 * 8 * 64 * 4


def test_a_window_on_a_ring_sends_only_edges():
    plan = plan_attention(
        seq_len=4000, ranks=4, mask=masks.sliding_window(100), layout="contiguous", exchange="ring"
    )
    assert [s.received_tokens for s in plan.stats()] == [0, 100, 100, 100]
    assert plan.rows[0].schedule.num_stages == 2


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks"), [(8, 8, 3), (8, 2, 4), (8, 1, 4), (3, 3, 5), (12, 4, 5)]
)
def test_heads_are_shared_out_with_the_key_heads_they_read(heads, kv_heads, ranks):
    plan = plan_attention(
        seq_len=50, ranks=ranks, layout="zigzag", exchange="ulysses", num_heads=heads, num_kv_heads=kv_heads
    )
    shares = plan.rows[0].shares
    assert shares is not None
    read = []
    for share in shares:
        for part in share.parts:
            assert share.kv_start <= part.kv_start < part.kv_stop <= share.kv_stop
            each, left = divmod(part.q_stop - part.q_start, part.kv_stop - part.kv_start)
            assert left == 0
            read += [
                (h, part.kv_start + (h - part.q_start) // each) for h in range(part.q_start, part.q_stop)
            ]
    assert read == [(h, h * kv_heads // heads) for h in range(heads)]
    assert sum(s.sent_bytes for s in plan.stats()) == sum(s.received_bytes for s in plan.stats())


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 5), st.integers(1, 6))
def test_groups_of_heads_bring_each_head_once(kv_heads, per_key, ranks, groups):
    for share in share_heads(kv_heads * per_key, kv_heads, ranks, groups):
        assert len(share.groups) == groups
        queries, come, leave = [], [], []
        for group in share.groups:
            queries += range(group.q_start, group.q_stop)
            come += range(group.kv_new, group.kv_stop)
            leave += range(group.kv_start, group.kv_done)
            read = {head // per_key for head in range(group.q_start, group.q_stop)}
            assert sorted(read) == list(range(group.kv_start, group.kv_stop))
            assert read <= set(come)
        assert queries == list(range(share.q_start, share.q_stop))
        assert come == leave == list(range(share.kv_start, share.kv_stop))


def test_long_sequences_travel_in_groups_of_heads_and_short_ones_at_once():
    def groups(seq_len: int, exchange: str = "ulysses", **choices) -> int:
        options = {"ranks": 2, "layout": "zigzag", "exchange": exchange} | choices
        shares = plan_attention(seq_len=seq_len, **options).rows[0].shares
        assert shares is not None
        return len(shares[0].groups)

    assert groups(512) == groups(512, num_kv_heads=1) == 1
    assert groups(1 << 16) == groups(1 << 16, num_kv_heads=1) == 4
    assert groups(1 << 16, num_heads=64) == 8
    assert groups(1 << 16, ranks=1) == 1
    # Between groups of ranks a key head would travel with each group of heads that reads it.
    assert groups(1 << 16, "hybrid", ranks=(2, 2)) == 4
    assert groups(1 << 16, "hybrid", ranks=(2, 2), num_kv_heads=2) == 1
    with pytest.raises(LongmeshError, match="groups=0: heads travel in at least 1 group"):
        Ulysses(groups=0)


DIGEST = """
import hashlib, numpy as np
from longmesh.attention import plan_attention, masks
h = hashlib.sha256()
for layout in ("solve", "auto", "round_robin"):
    lengths = [9000, 31, 7, 4000, 500, 600, 1111, 3000, 8, 900]
    plan = plan_attention(seq_len=sum(lengths), ranks=4, mask=masks.documents(lengths), layout=layout)
    for r in range(4):
        h.update(repr(plan.rows[0].rank(r)).encode())
print(h.hexdigest())
"""


def test_plans_are_the_same_in_every_process():
    digests = []
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        run = subprocess.run([sys.executable, "-c", DIGEST], env=environment, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        digests.append(run.stdout)
    assert digests[0] == digests[1]


def test_plans_are_cached_by_content():
    one = plan_attention(seq_len=64, ranks=2, mask=masks.documents([60, 4]))
    assert plan_attention(seq_len=64, ranks=2, mask=masks.documents([60, 4])) is one


def test_explain_tells_balance_traffic_and_stages():
    plan = plan_attention(
        seq_len=8192, ranks=2, mask=masks.documents([5000, 3192]), layout="zigzag", exchange="ring"
    )
    text = plan.explain()
    assert text.startswith(
        "attention over 8192 tokens on 2 ranks: documents(2 of 3192..5000 tokens, within=causal())"
    )
    for part in (
        "layout Zigzag, exchange Ring",
        "balance: busiest rank",
        "stage 1: passed on by the previous rank",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("choices", "text"),
    [
        ({"layout": "zig"}, "layout='zig' is not known; use one of contiguous, ordered, zigzag, striped"),
        ({"exchange": "rong"}, "exchange='rong' is not known; use one of sparse, ring, ulysses"),
        ({"num_heads": 8, "num_kv_heads": 3}, "3 key heads do not divide 8 query heads"),
        ({"ranks": (2, 2, 2)}, r"a mesh of 1 axis, or 2 \(inner, outer\) for hybrid, not 3"),
        ({"ranks": 0}, "at least 1 rank on each axis"),
        ({"ranks": (2, 2), "exchange": "ring"}, "exchange Ring runs on a mesh of 1 axis"),
        ({"seq_len": 0}, "must be at least 1"),
        ({"mask": masks.documents([50])}, "add up to 50, the sequence has 64 tokens"),
        ({"mask": masks.prefix_lm(65)}, "longer than the sequence of 64 tokens"),
        ({"mask": "causal"}, "mask='causal' is not a mask; use one of longmesh.attention.masks"),
        ({"seq_len": 64.0}, "seq_len must be a whole number, given 64.0"),
        ({"ranks": 1.5}, "ranks must be a whole number, given 1.5"),
        ({"head_dim": 0}, "head_dim=0: must be at least 1"),
    ],
)
def test_errors_say_what_is_wrong(choices, text):
    with pytest.raises(LongmeshError, match=text):
        plan_attention(**({"seq_len": 64, "ranks": 4} | choices))


@pytest.mark.parametrize("name", sorted(EXCHANGES))
def test_each_name_is_a_choice(name):
    ranks = (2, 2) if name == "hybrid" else 4
    assert plan_attention(seq_len=64, ranks=ranks, exchange=name, layout="zigzag").num_ranks == 4
