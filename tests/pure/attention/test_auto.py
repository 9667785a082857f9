"""`auto` takes the best of all pairs that it may take, and what it says of the others is true."""

import itertools
import re

import pytest

from longmesh.attention import masks, plan_attention
from longmesh.attention.exchange.named import EXCHANGES, auto_exchanges
from longmesh.attention.layout.named import LAYOUTS
from longmesh.attention.plan.choose import auto_layouts, fullest_buffers
from longmesh.attention.plan.predict import AS_FAST

GQA = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype_bytes": 2}
MHA = {"num_heads": 16, "num_kv_heads": 16, "head_dim": 64, "dtype_bytes": 4}


def packed(seq_len: int, shortest: int) -> masks.Mask:
    """Documents of a heavy tail: each next one is 1.6 times as long, over and over."""
    lengths: list[int] = []
    while sum(lengths) < seq_len:
        lengths.append(min(seq_len - sum(lengths), int(shortest * 1.6 ** (len(lengths) % 9))))
    return masks.documents(lengths)


def some_masks(seq_len: int) -> dict[str, masks.Mask]:
    return {
        "causal": masks.causal(),
        "full": masks.full(),
        "window": masks.sliding_window(seq_len // 16),
        "documents": packed(seq_len, seq_len // 512),
        "long documents": packed(seq_len, seq_len // 40),
        "prefix": masks.prefix_lm(seq_len // 4),
        "chunks": masks.chunked(seq_len // 8),
        "rows": masks.documents([[seq_len], [seq_len // 3, seq_len - seq_len // 3]]),
    }


def pairs_of(request):
    """Every plan that `auto` may take."""
    ranks = request["ranks"]
    inner, outer = ranks if isinstance(ranks, tuple) else (1, ranks)
    one = "kv_len" not in request
    exchanges = auto_exchanges(inner, outer, request["num_heads"], one)
    found = [
        plan_attention(**(request | {"layout": layout, "exchange": exchange}))
        for layout, exchange in itertools.product(auto_layouts(one), exchanges)
    ]
    assert len(found) >= 6
    return found


@pytest.mark.parametrize("cluster", ["h100", "cpu"])
@pytest.mark.parametrize("heads", [GQA, MHA], ids=["gqa", "mha"])
@pytest.mark.parametrize(("seq_len", "ranks"), [(8192, 4), (1 << 17, 16), (1 << 20, 64), (1 << 16, (4, 3))])
def test_auto_is_the_best_of_all_pairs(seq_len, ranks, heads, cluster):
    for name, mask in some_masks(seq_len).items():
        request = {"seq_len": seq_len, "ranks": ranks, "mask": mask, "cluster": cluster} | heads
        plan, pairs = plan_attention(**request), pairs_of(request)
        best = min(pair.predict().total_us for pair in pairs)
        assert plan.predict().total_us <= AS_FAST * best, name
        assert len(plan.passed_over) == len(pairs) - 1
        as_fast = [pair for pair in pairs if pair.predict().total_us <= AS_FAST * best]
        assert fullest_buffers(plan) == min(map(fullest_buffers, as_fast)), name


@pytest.mark.parametrize("cluster", ["h100", "cpu"])
@pytest.mark.parametrize("mask", [masks.full(), masks.causal(), masks.sliding_window(4096)])
def test_auto_is_the_best_where_keys_are_other_tokens(mask, cluster):
    request = {"seq_len": 4096, "kv_len": 1 << 16, "ranks": 8, "mask": mask, "cluster": cluster} | GQA
    pairs = pairs_of(request)
    assert "Cheapest" in {str(pair.exchange) for pair in pairs}
    best = min(pair.predict().total_us for pair in pairs)
    assert plan_attention(**request).predict().total_us <= AS_FAST * best


def test_a_long_causal_sequence_is_a_zigzag_ring():
    """Compared under sparse alone, the zigzag loses, and what remains holds ten times the keys."""
    plan = plan_attention(seq_len=1 << 20, ranks=64, cluster="h100", **GQA)
    assert (str(plan.layout), str(plan.exchange)) == ("Zigzag", "Ring")
    assert max(stats.peak_kv_bytes for stats in plan.stats()) == 192 << 20
    assert re.search(r"layout Solve with exchange Sparse would take 1\.\d\dx", plan.explain())


def test_documents_of_many_heads_are_swapped():
    mask = packed(1 << 17, 256)
    request = {"seq_len": 1 << 17, "ranks": 64, "mask": mask, "cluster": "h100"} | MHA | {"num_heads": 64}
    plan = plan_attention(**(request | {"num_kv_heads": 64}))
    rival = plan_attention(**(request | {"num_kv_heads": 64}), layout="contiguous", exchange="ulysses")
    assert plan.predict().total_us <= AS_FAST * rival.predict().total_us


SAID = re.compile(r"(?:layout (\w+))?(?: with )?(?:exchange (\w+))? would take ([0-9.]+)x")


@pytest.mark.parametrize("name", ["causal", "documents", "window", "prefix"])
def test_what_explain_says_of_the_others_is_true(name):
    request = {"seq_len": 1 << 16, "ranks": 8, "mask": some_masks(1 << 16)[name], "cluster": "h100"} | GQA
    plan = plan_attention(**request)
    said = [match.groups() for match in SAID.finditer(plan.explain())]
    assert said
    names = {str(value): value for table in (LAYOUTS, EXCHANGES) for value in table.values()}
    for layout, exchange, ratio in said:
        choice = {"layout": names.get(layout, plan.layout), "exchange": names.get(exchange, plan.exchange)}
        other = plan_attention(**request, **choice).predict().total_us
        assert float(ratio) == pytest.approx(other / plan.predict().total_us, abs=0.006)


def test_of_pairs_that_are_as_fast_the_one_of_least_memory():
    plan = plan_attention(seq_len=8192, ranks=4, mask=masks.full())
    as_fast = [x for x in plan.passed_over if x.prediction.total_us <= AS_FAST * plan.predict().total_us]
    assert as_fast and all(other.buffer_bytes >= fullest_buffers(plan) for other in as_fast)
    assert "is predicted to take as long, within 1%, with buffers of " in plan.explain()


def test_no_exchange_is_taken_that_leaves_ranks_without_heads():
    assert "Ulysses" in {str(x) for x in auto_exchanges(1, 8, 8, True)}
    assert "Ulysses" not in {str(x) for x in auto_exchanges(1, 8, 7, True)}
    assert {str(x) for x in auto_exchanges(2, 4, 8, True)} == {"Hybrid(outer=Sparse)", "Hybrid(outer=Ring)"}
