"""Queries that are other tokens than keys: masks at an offset, plans on simulated ranks, errors."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from longmesh.attention import masks, plan_attention
from longmesh.attention.exchange.fragment import START, STOP
from longmesh.attention.layout.named import LAYOUTS
from longmesh.attention.mask import slices as sl
from longmesh.attention.mask.axes import SequenceAxes, axes_of, slices_on
from longmesh.errors import LongmeshError
from support.exchanges import OF_QUERIES, ON_ONE_AXIS, ON_TWO_AXES
from tests.pure.attention.test_masks import any_mask, dense_on, paint
from tests.pure.attention.test_plan import carry_out


@st.composite
def masks_on_axes(draw) -> tuple[masks.Mask, SequenceAxes]:
    """A mask, and lengths of both sides; either may be empty, and queries may stand anywhere."""
    if draw(st.booleans()):
        axes = SequenceAxes(draw(st.integers(0, 24)), draw(st.integers(0, 24)), draw(st.integers(0, 12)))
        return draw(any_mask(max(axes.kv_len, axes.seq_len + axes.q_offset))), _fit(axes)
    if draw(st.booleans()):
        count = draw(st.integers(1, 4))
        sizes = st.lists(st.integers(0, 7), min_size=count, max_size=count)
        queries, keys = draw(sizes), draw(sizes)
        within = draw(st.sampled_from([None, masks.full(), masks.sliding_window(2), masks.prefix_lm(0)]))
        mask = masks.documents(queries, within, kv_lengths=keys)
        return mask, SequenceAxes(sum(queries), sum(keys))
    axes = SequenceAxes(draw(st.integers(0, 24)), draw(st.integers(0, 24)))
    axes = axes._replace(q_offset=axes.kv_len - axes.seq_len)
    band = st.sampled_from([masks.full(), masks.causal(), masks.sliding_window(3, 1), masks.prefix_lm(0)])
    left, right = draw(band), draw(st.one_of(band, st.just(masks.chunked(5))))
    return (left & right if draw(st.booleans()) else left | right), axes


def _fit(axes: SequenceAxes) -> SequenceAxes:
    """Documents and prefixes are drawn for all positions: let the keys reach as far."""
    return axes._replace(kv_len=max(axes.kv_len, axes.seq_len + axes.q_offset))


@given(masks_on_axes())
@settings(max_examples=300)
def test_slices_at_an_offset_say_what_the_predicate_says(made):
    mask, axes = made
    if axes.kv_len == 0 or axes.seq_len + axes.q_offset == 0:
        mask = masks.causal()
    slices = slices_on(mask, axes)
    sizes = axes.seq_len, axes.kv_len
    exact, asked = (paint(slices[slices[:, sl.EW] == kind], *sizes) for kind in (0, 1))
    seen = dense_on(mask, axes)
    assert (exact + asked).max(initial=0) <= 1
    assert (exact + asked * seen == seen).all()
    assert sl.area(slices).sum() == (exact + asked).sum()


@given(st.data())
@settings(max_examples=300)
def test_every_visible_pair_is_computed_once(data):
    mask, axes = data.draw(masks_on_axes())
    if axes.kv_len == 0 or axes.seq_len + axes.q_offset == 0:
        mask = masks.causal()
    striped = data.draw(st.booleans())
    side = st.just("striped") if striped else st.sampled_from(sorted(set(LAYOUTS) - {"striped"}))
    exchange = data.draw(st.sampled_from((*ON_ONE_AXIS, *OF_QUERIES, *ON_TWO_AXES)))
    ranks = data.draw(st.integers(1, 6))
    if exchange in ON_TWO_AXES:
        ranks = (data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)))
    plan = plan_attention(
        seq_len=axes.seq_len,
        kv_len=axes.kv_len,
        q_offset=None if mask.numbers_queries else axes.q_offset,
        ranks=ranks,
        mask=mask,
        layout=data.draw(side),
        kv_layout=data.draw(side),
        exchange=exchange,
        chunk=data.draw(st.integers(1, 9)),
        num_heads=4,
        num_kv_heads=data.draw(st.sampled_from([1, 2, 4])),
        head_dim=data.draw(st.sampled_from([4, 6])),
        v_head_dim=4,
    )
    carry_out(plan)
    stats = plan.stats()
    assert sum(s.tokens for s in stats) == axes.seq_len and sum(s.kv_tokens for s in stats) == axes.kv_len
    assert sum(s.sent_bytes for s in stats) == sum(s.received_bytes for s in stats)
    assert "queries and" in plan.explain() or axes.is_one_sequence
    assert plan.predict().total_us > 0 or sum(s.area for s in stats) == 0


def test_one_sequence_is_planned_as_before():
    """kv_len of the sequence's own length changes nothing: the same plan, from the cache."""
    assert plan_attention(seq_len=40, ranks=3, kv_len=40) is plan_attention(seq_len=40, ranks=3)
    row = plan_attention(seq_len=40, ranks=3, exchange="sparse").rows[0]
    assert row.kv_ownership is row.ownership and row.schedule.kv_ownership is row.schedule.ownership


def test_queries_stand_at_the_end_of_the_keys_unless_told():
    assert axes_of(masks.causal(), 3, 10, None) == SequenceAxes(3, 10, 7)
    assert axes_of(masks.causal(), 3, 10, 0) == SequenceAxes(3, 10, 0)
    assert axes_of(masks.documents([3], kv_lengths=[10]), 3, 10, None) == SequenceAxes(3, 10, 0)
    assert axes_of(masks.documents([3], kv_lengths=[10]) & masks.full(), 3, 10, None) == SequenceAxes(
        3, 10, 0
    )
    assert str(SequenceAxes(3, 10, 7)) == "3 queries and 10 keys, the first at position 7"
    plan = plan_attention(seq_len=3, kv_len=10, ranks=1)
    assert plan.rows[0].rank(0).stages[0].blocks[0].hi == 7


def test_values_inside_keys_and_of_another_width_weigh_less():
    sizes = {"seq_len": 8, "kv_len": 64, "ranks": 2, "exchange": "sparse", "mask": masks.full()}
    heads = {"num_heads": 128, "num_kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "dtype_bytes": 2}
    apart, inside = plan_attention(**sizes, **heads), plan_attention(**sizes, **heads, v_in_k=True)
    assert apart.stats()[0].received_bytes == 32 * (576 + 512) * 2
    assert inside.stats()[0].received_bytes == 32 * 576 * 2
    assert "whose first 512 features are the values" in inside.explain()
    assert "values of 512" in apart.explain()


@pytest.mark.parametrize(
    ("heads", "share"),
    [
        ({"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}, 0.166),
        ({"num_heads": 128, "num_kv_heads": 8, "head_dim": 128}, 0.041),
        ({"num_heads": 128, "num_kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "v_in_k": True}, 0.0028),
    ],
)
def test_what_a_query_costs_in_keys(heads, share):
    plan = plan_attention(seq_len=8, ranks=2, dtype_bytes=2, **heads)
    assert 1 / plan.heads.query_cost == pytest.approx(share, rel=0.02)


def block_mask(queries: int, keys: int) -> masks.Mask:
    made = create_block_mask(lambda b, h, i, j: j <= i, None, None, queries, keys, device="cpu", BLOCK_SIZE=8)
    return masks.from_block_mask(made)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_len": -1}, "kv_len=-1: must be at least 0"),
        ({"seq_len": -1}, "seq_len=-1: must be at least 0"),
        ({"q_offset": 0.5}, "q_offset must be a whole number, given 0.5"),
        ({"layout": "striped", "kv_layout": "zigzag"}, "numbers queries in stripes of 2 and kv_layout Zigzag keys in"),
        ({"mask": masks.prefix_lm(30)}, "is longer than the sequence of 20 tokens"),
        ({"mask": masks.mask_mod(lambda b, h, i, j: j <= i), "seq_len": 23}, "the first would stand at position -3"),
        ({"mask": masks.documents([4, 1], kv_lengths=[20, 1])}, "documents of keys add up to 21, there are 20 keys"),
        ({"mask": masks.documents([4], kv_lengths=[20])}, "documents of queries add up to 4, there are 5 queries"),
        ({"mask": block_mask(5, 10)}, "is for 5 queries and 10 keys, the sequence has 5 queries and 20 keys"),
        ({"mask": block_mask(5, 20), "q_offset": 3}, "numbers queries from 0 by itself; leave q_offset= out"),
        ({"mask": block_mask(5, 20) & masks.causal()}, "or give q_offset=0 if it numbers queries from 0, too"),
        ({"v_in_k": True, "v_head_dim": 65}, "values of 65 features cannot be the first ones of keys of 64"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_says_why(change, message):
    with pytest.raises(LongmeshError, match=message.replace("(", r"\(")):
        plan_attention(**({"seq_len": 5, "kv_len": 20, "ranks": 2} | change))


def test_documents_of_both_sides_must_be_as_many():
    with pytest.raises(LongmeshError, match="each document of queries needs one of keys"):
        masks.documents([1, 2], kv_lengths=[3])


def test_a_layout_for_the_keys_alone_may_look_at_the_mask():
    """Round robin deals the keys by how many queries see them."""
    mask = masks.documents([8, 8], masks.full(), kv_lengths=[4, 60])
    plan = plan_attention(
        seq_len=16, kv_len=64, ranks=2, mask=mask, layout="contiguous", kv_layout="round_robin", chunk=2
    )
    assert dataclasses.asdict(plan.rows[0].kv_ownership)["moved"] == ()
    assert np.ptp(plan.rows[0].kv_ownership.counts) <= 4


@given(st.data())
@settings(max_examples=200)
def test_cheapest_sends_the_lighter_of_each_pair(data):
    """Bytes by definition, pair by pair of ranks: never more than all keys or all queries, and the least if the mask
    is of one piece."""
    mask, axes = data.draw(masks_on_axes())
    if axes.kv_len == 0 or axes.seq_len + axes.q_offset == 0:
        mask = masks.causal()
    ranks = data.draw(st.integers(1, 5))
    side = st.sampled_from(["contiguous", "zigzag", "round_robin"])
    heads = data.draw(st.sampled_from([(4, 4, 8, 8), (8, 1, 8, 8), (4, 1, 8, 2), (6, 2, 16, 4)]))
    plan = plan_attention(
        seq_len=axes.seq_len, kv_len=axes.kv_len, q_offset=None if mask.numbers_queries else axes.q_offset,
        ranks=ranks, mask=mask, layout=data.draw(side), kv_layout=data.draw(side), exchange="cheapest",
        chunk=2, num_heads=heads[0], num_kv_heads=heads[1], head_dim=heads[2], v_head_dim=heads[3], dtype_bytes=2,
    )  # fmt: skip
    carry_out(plan)
    row, (H, G, D, E) = plan.rows[0], heads
    painted = slices_on(mask, axes)
    seen = paint(painted, axes.seq_len, axes.kv_len) > 0  # as blocks show it: elementwise ones are whole
    keys = queries = least = 0
    for i in range(ranks):
        for j in range(ranks):
            if i != j:
                block = seen[np.ix_(row.positions(i), row.kv_ownership.positions(j))]
                of_keys = int(block.any(axis=0).sum()) * G * (D + E) * 2
                of_queries = int(block.any(axis=1).sum()) * H * (D * 2 + (E + 1) * 4)
                keys, queries, least = keys + of_keys, queries + of_queries, least + min(of_keys, of_queries)
    sent = sum(stats.received_bytes for stats in plan.stats())
    assert sent <= min(keys, queries)
    if len(painted) == 1 and sent not in (keys, queries):
        assert sent == least


def test_cheapest_takes_fewer_collectives_where_bytes_are_equal():
    """Equal weights: keys come, in one collective, and no query goes there and back in two."""
    plan = plan_attention(
        seq_len=6, kv_len=6, ranks=2, mask=masks.full(), layout="contiguous", kv_layout="contiguous",
        exchange="cheapest", num_heads=1, num_kv_heads=1, head_dim=6, v_head_dim=6, dtype_bytes=8,
    )  # fmt: skip
    # A query weighs 6 + 7 elements of 8 bytes, a key 12: keys travel.
    assert plan.rows[0].schedule.last_stage == 1 and len(plan.rows[0].schedule.queries) == 0


def test_cheapest_chooses_for_each_sequence():
    """Of two sequences on the same two ranks, one is decoded (queries travel) and the other prefilled (keys do)."""
    mask = masks.documents([20, 60_000], masks.full(), kv_lengths=[60_000, 60_000])
    plan = plan_attention(
        seq_len=60_020, kv_len=120_000, ranks=2, mask=mask, layout="per_document", kv_layout="per_document",
        exchange="cheapest", num_heads=8, num_kv_heads=2, head_dim=8, dtype_bytes=2,
    )  # fmt: skip
    schedule = plan.rows[0].schedule
    assert int((schedule.queries[:, STOP] - schedule.queries[:, START]).sum()) == 20
    assert int(schedule.needs.remote_tokens.sum()) == 60_000
    assert "queries computed on other ranks: 20; " in plan.explain()
