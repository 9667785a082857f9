"""Predicted times: what they must obey whatever the machine, and choices that follow the machine."""

import dataclasses

import pytest
from hypothesis import given, settings, strategies as st

from longmesh.attention import masks, plan_attention
from longmesh.attention.layout.named import LAYOUTS
from longmesh.attention.plan.predict import AS_FAST, MANY, ranks_to_look_at
from longmesh.attention.plan.stats import rank_stats
from longmesh.plan import Cluster, Level, Link, Rate, named_cluster
from support.exchanges import OF_HEADS, OF_KEYS, ON_TWO_AXES
from tests.pure.attention.test_masks import any_mask


def machine(
    *, bytes_per_us: float, latency_us: float = 15.0, overlap: float = 0.9, name: str = "machine"
) -> Cluster:
    base = named_cluster("h100")
    link = Link.of(latency_us=latency_us, bytes_per_us=bytes_per_us, peer_us=1.0)
    return dataclasses.replace(
        base, name=name, levels=(base.levels[0], Level("node", None, link)), overlap=overlap
    )


FAST, SLOW = machine(bytes_per_us=400_000.0), machine(bytes_per_us=1_000.0)
MODEL = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype_bytes": 2}


@pytest.mark.parametrize("mask", [masks.causal(), masks.documents([32768, 16384, 8192, 8192])])
def test_clusters_that_differ_in_link_speed_choose_differently_and_each_better(mask):
    plans = {c: plan_attention(seq_len=1 << 16, ranks=8, mask=mask, cluster=c, **MODEL) for c in (FAST, SLOW)}
    chosen = {c: (plan.layout, plan.exchange) for c, plan in plans.items()}
    assert chosen[FAST] != chosen[SLOW]
    for mine, other in ((FAST, SLOW), (SLOW, FAST)):
        layout, exchange = chosen[other]
        theirs = plan_attention(
            seq_len=1 << 16, ranks=8, mask=mask, layout=layout, exchange=exchange, cluster=mine, **MODEL
        )
        # What is closer than AS_FAST counts as equal; on slow links the other's choice is far off.
        assert plans[mine].predict().total_us < (AS_FAST if mine is FAST else 0.9) * theirs.predict().total_us
        assert plans[mine].digest != theirs.digest


def test_the_cluster_is_part_of_the_digest():
    plans = [plan_attention(seq_len=64, ranks=2, exchange="ring", cluster=c) for c in (FAST, SLOW, "cpu")]
    assert len({plan.digest for plan in plans}) == 3
    assert plan_attention(seq_len=64, ranks=2, exchange="ring").digest == plans[2].digest


@given(st.data())
@settings(max_examples=60)
def test_times_are_no_less_than_computing_and_fall_with_faster_links(data):
    seq_len = data.draw(st.integers(1, 40))
    request = {
        "seq_len": seq_len,
        "ranks": data.draw(st.sampled_from([1, 2, 3, 5, (2, 2), (3, 2)])),
        "mask": data.draw(any_mask(seq_len)),
        "layout": data.draw(st.sampled_from(sorted(set(LAYOUTS) - {"auto"}))),
        "num_heads": 6,
        "num_kv_heads": data.draw(st.sampled_from([1, 2, 6])),
    }
    names = ON_TWO_AXES if isinstance(request["ranks"], tuple) else (*OF_KEYS, *OF_HEADS)
    request["exchange"] = data.draw(st.sampled_from(names))
    fast, slow = (plan_attention(cluster=c, **request).predict() for c in (FAST, SLOW))
    for quick, long in zip(fast, slow, strict=True):
        assert 0 <= quick.compute_us <= quick.total_us + 1e-6
        assert quick.total_us <= long.total_us + 1e-6
        assert quick.compute_us == long.compute_us
    assert fast.backward.compute_us >= fast.forward.compute_us


def test_what_stays_in_a_node_is_cheap():
    """16 ranks, nodes of 4: a window's neighbours are mostly in the node; a causal mask's keys are not."""
    quick, dear = (
        Link.of(latency_us=5.0, bytes_per_us=300_000.0),
        Link.of(latency_us=5.0, bytes_per_us=1000.0),
    )
    base = named_cluster("h100")
    nodes = dataclasses.replace(
        base, levels=(base.levels[0], Level("node", 4, quick), Level("pod", None, dear))
    )
    all_dear = dataclasses.replace(base, levels=(base.levels[0], Level("pod", None, dear)))
    request = {"seq_len": 1 << 14, "ranks": 16, "layout": "contiguous", "exchange": "sparse"} | MODEL
    inner = plan_attention(mask=masks.chunked(1 << 12), cluster=nodes, **request)  # a chunk is a node's
    outer = plan_attention(mask=masks.chunked(1 << 12), cluster=all_dear, **request)
    assert inner.predict().total_us < 0.2 * outer.predict().total_us
    ring = [plan_attention(cluster=c, **(request | {"exchange": "ring"})) for c in (nodes, all_dear)]
    assert ring[0].predict() == ring[1].predict()  # at the pace of its slowest link


def test_on_many_ranks_only_some_are_looked_at():
    few = plan_attention(seq_len=4096, ranks=MANY, layout="zigzag", exchange="ring")
    assert ranks_to_look_at(few.rows[0].schedule) == list(range(MANY))
    many = plan_attention(seq_len=1 << 16, ranks=1000, layout="contiguous", exchange="sparse")
    looked_at = ranks_to_look_at(many.rows[0].schedule)
    assert 999 in looked_at and len(looked_at) <= 11  # the last one computes most of a causal mask


@pytest.mark.parametrize(
    ("ranks", "layout", "exchange"),
    [
        (40, "solve", "sparse"),
        (40, "zigzag", "ring"),
        ((2, 40), "zigzag", "hybrid"),
        (40, "zigzag", "ulysses"),
    ],
)
def test_of_many_ranks_some_are_explained(ranks, layout, exchange):
    mask = masks.documents([1000, 3000, 3, 997])
    plan = plan_attention(
        seq_len=5000, ranks=ranks, mask=mask, layout=layout, exchange=exchange, num_heads=40
    )
    text = plan.explain()
    assert len(text.splitlines()) < 80 and "more ranks: stats() has them all" in text
    some = [0, 7, 12, plan.num_ranks - 1]
    assert rank_stats(plan, some) == tuple(plan.stats()[rank] for rank in some)
    assert ("... 36 more stages" in text) == (exchange == "ring")
    areas = [stats.area for stats in plan.stats()]
    assert f"busiest rank {max(areas) * len(areas) / sum(areas):.3f} times the mean" in text


def test_a_window_is_not_chopped_to_move_what_nobody_sees():
    plan = plan_attention(
        seq_len=2048, ranks=2, mask=masks.sliding_window(256), layout="solve", exchange="sparse"
    )
    assert max(stats.kernel_calls for stats in plan.stats()) <= 4


def test_rates_by_kind_of_tile():
    rates = (Rate("attention", "float32", 512, 100.0), Rate("attention", "float32", 512, 50.0, "causal"))
    cluster = Cluster("rates", FAST.levels, rates)
    full, causal = (
        plan_attention(seq_len=512, ranks=1, mask=m, cluster=cluster).predict().forward.compute_us
        for m in (masks.full(), masks.causal())
    )
    assert full == pytest.approx(4 * 512 * 512 * 8 * 64 / 100.0)
    assert causal == pytest.approx(4 * (512 * 513 // 2) * 8 * 64 / 50.0)


def test_explain_gives_times_and_reasons():
    plan = plan_attention(seq_len=1 << 16, ranks=8, mask=masks.causal(), cluster=SLOW, **MODEL)
    text = plan.explain()
    assert "predicted on machine (typical figures, not measured), batch of 1: forward " in text
    assert " would take " in text and "it waits and copies " in text
    lines = [line for line in text.splitlines() if " take " in line]
    for name in ({"Contiguous", "Zigzag", "Solve"} - {str(plan.layout)}) | ({"Ring"} - {str(plan.exchange)}):
        assert any(name in line.split(":")[0] for line in lines), name
    measured = dataclasses.replace(SLOW, measured=True)
    assert "predicted on machine, batch" in plan_attention(seq_len=64, ranks=2, cluster=measured).explain()
    one = plan_attention(seq_len=3, ranks=2, layout="contiguous", exchange="ring").explain()
    assert "on 2 ranks" in one and "rank 1: 2 keys arrive, 1 block, 2 pairs" in one and "1 blocks" not in one


def test_explain_calls_nothing_slower_that_is_as_fast():
    text = plan_attention(seq_len=8192, ranks=4, mask=masks.full()).explain()
    assert (
        "layout Zigzag is predicted to take as long, within 1%, with buffers of 16.0 MiB against 16.0 MiB"
        in text
    )
    assert (
        "exchange Sparse is predicted to take as long, within 1%, with buffers of 24.0 MiB against 16.0 MiB"
        in text
    )
    assert "0.99x" not in text and "1.00x" not in text


def test_a_transfer_costs_for_each_peer():
    slow, full = dataclasses.replace(FAST, transfer_us=1000.0), {"seq_len": 1024, "mask": masks.full()}

    def added(exchange, ranks):
        how = {"layout": "contiguous", "exchange": exchange, "ranks": ranks}
        with_it, without = (plan_attention(**full, **how, cluster=c).predict().total_us for c in (slow, FAST))
        return round((with_it - without) / 1000)

    # Keys come once, and again in backward, when gradients go home: from three peers at once, or one after another.
    assert added("allgather", 4) == added("ring", 4) == 9
    assert added("ulysses", 4) == 2 * 2 * 3  # there and back, in both passes
    assert added("hybrid", (2, 2)) == 3 + 2 * 2


def test_tokens_that_are_not_adjacent_take_longer_to_swap():
    def total(layout):
        plan = plan_attention(
            seq_len=4096, ranks=4, mask=masks.full(), layout=layout, exchange="ulysses", cluster=SLOW
        )
        return plan.predict().total_us

    assert total("contiguous") < total("zigzag")
