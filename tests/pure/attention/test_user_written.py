"""Masks, layouts and exchanges of users' own are checked when they are planned; a pair never counts twice."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, strategies as st

from longmesh.attention import (
    Exchange,
    Hybrid,
    Ownership,
    StagedExchange,
    TokenLayout,
    Workload,
    masks,
    plan_attention,
)
from longmesh.attention.exchange.fragment import AT, OWNER, RANK, STAGE, START, STOP
from longmesh.attention.mask.slices import first_overlap
from longmesh.attention.user_written import check_slices
from longmesh.errors import LongmeshError
from tests.pure.attention.test_masks import bands, paint

FAR = 1 << 62


@dataclasses.dataclass(frozen=True)
class Slices(masks.Mask):
    """A mask of a user's own: the slices as they are given."""

    rows: tuple[tuple[int, ...], ...]

    def slices(self, seq_len, *, row=0, num_heads=1):
        return np.array([(*r, *(0, 0, 0, 0, -FAR, FAR, 0)[len(r) :]) for r in self.rows], dtype=np.int64)

    def visible(self, b, h, q_idx, kv_idx):
        raise AssertionError("planning asks for no pair")

    def __str__(self):
        return "mine"


OVERLAP = ((0, 8, 0, 8), (4, 12, 4, 12))


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (
            OVERLAP,
            r"mask mine: slices \(0, 8, 0, 8\) and \(4, 12, 4, 12\) overlap, so pairs in both would count twice",
        ),
        (((0, 8, 0, 8), (0, 8, 0, 8)), "overlap"),
        (((0, 8, 0, 8, -FAR, 0), (0, 8, 0, 8, 0, FAR)), r"\(0, 8, 0, 8, -\d+, 0\) and .* overlap"),
        (((0, 8, 0, 8), (2, 3, 2, 3, -FAR, FAR, 1)), "overlap"),
        (((0, 8, 0, 17),), r"slice \(0, 8, 0, 17\) is outside of queries 0 to 16 and keys 0 to 16; cut it"),
        (((-1, 8, 0, 8),), "is outside of queries 0 to 16"),
        (((0, 8, -3, 8),), "is outside"),
        (((8, 0, 0, 8),), r"slice \(8, 0, 0, 8\) ends before it begins"),
        (((0, 8, 9, 2),), "ends before it begins"),
        (((0, 8, 0, 8, 3, -3),), "ends before it begins"),
        (((0, 8, 0, 8, 0, 3, 2),), "elementwise, must be 0 or 1"),
    ],
)
def test_slices_that_are_wrong_are_refused(rows, text):
    with pytest.raises(LongmeshError, match=text):
        plan_attention(seq_len=16, ranks=2, mask=Slices(rows))


@pytest.mark.parametrize("returned", [[(0, 8, 0, 8)], np.zeros((2, 4), dtype=np.int64), None])
def test_what_is_no_array_of_slices_is_refused(returned):
    with pytest.raises(LongmeshError, match=r"slices\(\) returned .*; return masks.make_slices"):
        check_slices("mine", returned, (0, 8), 8)
    with pytest.raises(LongmeshError, match="numbers of float64; they are whole"):
        check_slices("mine", np.zeros((1, 7)), (0, 8), 8)


@pytest.mark.parametrize(
    "mask",
    [
        Slices(OVERLAP) & masks.causal(),
        masks.causal() | Slices(OVERLAP),
        masks.documents([16, 16], within=Slices(OVERLAP)),
        masks.documents([16, 16], kv_lengths=[16, 16], within=Slices(OVERLAP)),
        masks.chunked(16, within=Slices(OVERLAP) & masks.full()),
    ],
)
def test_masks_inside_others_are_checked_too(mask):
    with pytest.raises(LongmeshError, match=r"mask mine: .* overlap"):
        plan_attention(seq_len=32, ranks=2, mask=mask)


def test_a_mask_inside_documents_stays_in_its_document():
    """It would reach into the next one, whose tokens it may not see, and no slices would overlap."""
    mask = masks.documents([8, 8], within=Slices(((0, 8, 0, 9),)))
    with pytest.raises(LongmeshError, match="outside of queries 0 to 8 and keys 0 to 8"):
        plan_attention(seq_len=16, ranks=2, mask=mask)


def test_other_keys_than_queries_are_checked_too():
    with pytest.raises(LongmeshError, match="overlap"):
        plan_attention(seq_len=4, kv_len=16, ranks=2, mask=Slices(((0, 16, 0, 16), (14, 16, 3, 5))))


def test_empty_slices_and_slices_that_touch_are_no_mistake():
    rows = ((0, 8, 0, 8, -FAR, -1), (0, 8, 0, 8, 0, FAR), (8, 8, 0, 16), (8, 16, 3, 3), (8, 16, 0, 16))
    plan = plan_attention(seq_len=16, ranks=3, mask=Slices(rows), layout="zigzag", exchange="ring")
    assert sum(stats.area for stats in plan.stats()) == 8 * 8 + 8 * 16


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ((0, 8, 0), r"\(0, 8, 0\) has 3 numbers; a slice is \(q0, q1, k0, k1\)"),
        ((0, 8, 0, 8, 0), "has 5 numbers"),
        ((0, 8.0, 0, 8), r"each number of \(0, 8.0, 0, 8\) must be a whole number, given 8.0"),
        ((8, 0, 0, 8), "ends before it begins: queries from 8 to 0"),
        ((0, 8, 8, 0), "ends before it begins: keys from 8 to 0"),
        ((0, 8, 0, 8, 1, -1), "ends before it begins: key - query from 1 to -1; the order is"),
    ],
)
def test_make_slices_refuses_what_is_no_slice(row, text):
    with pytest.raises(LongmeshError, match=text):
        masks.make_slices(row)


@given(st.data())
def test_overlaps_are_those_of_single_pairs(data):
    seq_len = data.draw(st.integers(1, 12))
    slices = masks.make_slices(*data.draw(st.lists(bands(seq_len), max_size=4)))
    pair = first_overlap(slices)
    assert (pair is not None) == bool((paint(slices, seq_len) > 1).any())
    if pair is not None:
        assert (paint(slices[list(pair)], seq_len) > 1).any()


def test_many_slices_are_compared_in_parts():
    blocks = [(q, q + 4, k, k + 4) for q in range(0, 160, 4) for k in range(0, 160, 4)]
    assert first_overlap(masks.make_slices(*blocks)) is None
    assert first_overlap(masks.make_slices(*blocks, (159, 160, 3, 5))) == (39 * 40, 1600)


def test_the_packages_own_masks_are_not_looked_at(monkeypatch):
    def never(*_):
        raise AssertionError("our own masks are proved by tests")

    monkeypatch.setattr("longmesh.attention.mask.base.check_slices", never)
    mask = masks.documents([5, 12], within=masks.causal() & masks.sliding_window(3)) | masks.prefix_lm(2)
    assert plan_attention(seq_len=17, ranks=2, mask=mask).seq_len == 17


@dataclasses.dataclass(frozen=True)
class Moved(TokenLayout):
    moved: tuple[tuple[int, ...], ...]

    def assign(self, work: Workload, ranks: int) -> Ownership:
        return Ownership(work.seq_len, (((0, 8),), ((8, 16),)), moved=self.moved)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("moved", "text"),
    [
        (
            ((8, 12, 0, 4, 0), (10, 16, 2, 6, 0)),
            "rectangles .8, 12, 0, 4, 0. and .10, 16, 2, 6, 0. of moved overlap",
        ),
        (((8, 12, 0, 4, 2),), "is no rectangle .q0, q1, k0, k1, rank. of 16 queries, 16 keys and 2 ranks"),
        (((8, 17, 0, 4, 0),), "is no rectangle"),
        (((12, 8, 0, 4, 0),), "is no rectangle"),
    ],
)
def test_rectangles_of_a_layout_of_ones_own_are_checked(moved, text):
    with pytest.raises(LongmeshError, match=text):
        plan_attention(seq_len=16, ranks=2, layout=Moved(moved), exchange="sparse")
    assert (
        plan_attention(seq_len=16, ranks=2, layout=Moved(((8, 12, 0, 4, 0),)), exchange="sparse").num_ranks
        == 2
    )


@dataclasses.dataclass(frozen=True)
class Staged(StagedExchange):
    kind: str

    def stages(self, remote, owned):
        out = remote.copy()
        out[:, STAGE] = (out[:, RANK] - out[:, OWNER]) % owned.num_ranks
        if self.kind == "twice":
            again = out[:1].copy()
            again[:, STAGE] += 1
            return np.concatenate([out, again])
        if self.kind == "short":
            out[0, STOP] -= 1
        return out[1:] if self.kind == "missing" else out


@pytest.mark.parametrize("ranks", [3, (2, 3)])
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("twice", "key 0 arrives at rank 1 twice, so it would count twice"),
        ("missing", "of keys 0 to 4, which rank 1 needs, 0 of 4 arrive"),
        ("short", "of keys 0 to 4, which rank 1 needs, 3 of 4 arrive; bring every fragment"),
    ],
)
def test_an_exchange_of_ones_own_brings_every_key_once(kind, text, ranks):
    def plan(kind):
        exchange: Exchange = Staged(kind)
        exchange = Hybrid(outer=exchange) if isinstance(ranks, tuple) else exchange
        return plan_attention(seq_len=12, ranks=ranks, layout="contiguous", exchange=exchange)

    with pytest.raises(LongmeshError, match=text):
        plan(kind)
    assert plan("right").num_ranks in (3, 6)


@dataclasses.dataclass(frozen=True)
class Passed(StagedExchange):
    """A ring of whole shards, but for one mistake."""

    kind: str
    hops = (1,)

    def stages(self, remote, owned):
        rows = [
            ((owner + stage) % owned.num_ranks, stage, owner, at, at + stop - start, 0, start)
            for start, stop, owner, at in owned.table.tolist()
            for stage in range(1, owned.num_ranks)
        ]
        out = np.array(rows, dtype=np.int64)
        if self.kind == "early":
            out[out[:, STAGE] == 2, STAGE] = 1
        if self.kind == "forgotten":
            out[np.ix_((out[:, STAGE] == 1) & (out[:, OWNER] == 0), [START, AT])] += 1
        return out


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("early", r"keys of rank 1 arrive at rank 0 in stage 1, and hops of \(1,\) do not lead there"),
        (
            "forgotten",
            "rank 2 is to get rows 0 to 4 of a shard in stage 2 from rank 1, which held 1 to 4 in the stage",
        ),
    ],
)
def test_a_rank_passes_on_what_it_holds(kind, text):
    def plan(kind):
        mask = masks.sliding_window(3)
        return plan_attention(seq_len=12, ranks=3, mask=mask, layout="contiguous", exchange=Passed(kind))

    with pytest.raises(LongmeshError, match=text):
        plan(kind)
    assert "passed on by the previous rank" in plan("right").explain()
