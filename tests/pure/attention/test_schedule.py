"""The fast schedule, one rank at a time from intervals, against its definition token by token."""

import dataclasses
import itertools
import weakref

import numpy as np
from hypothesis import given, settings, strategies as st

from longmesh.attention import Ownership, StagedExchange, Workload, plan_attention
from longmesh.attention.exchange.fragment import OFFSET, OWNER, RANK, STAGE, START, STOP
from longmesh.attention.execute.route import BoundRow
from longmesh.attention.layout.named import LAYOUTS
from longmesh.attention.mask.block import UNBOUNDED
from longmesh.attention.mask.slices import (
    area,
    area_of_one,
    make_slices,
    subtract,
    subtract_each,
    subtract_rectangle,
    tighten,
    tighten_one,
)
from longmesh.attention.plan import merge_tiles as tile
from longmesh.attention.plan.intervals import covered_before, least_over
from longmesh.attention.plan.schedule import Schedule, make_schedule
from longmesh.attention.plan.stats import peak_stage_rows, traffic
from support.exchanges import OF_KEYS
from support.slow_schedule import as_rows, stages_of_keys
from tests.pure.attention.test_masks import any_mask


@dataclasses.dataclass(frozen=True)
class ByTable(StagedExchange):
    """A user's own exchange: everything at once."""

    def stages(self, remote: np.ndarray, owned: Ownership) -> np.ndarray:
        fragments = remote.copy()
        fragments[:, STAGE] = 1
        return fragments


EXCHANGES = [ByTable(), *OF_KEYS]
DEFINED = [
    x for x in EXCHANGES if x == ByTable() or not isinstance(x, StagedExchange)
]  # in support.slow_schedule


@st.composite
def schedules(draw, exchanges=tuple(EXCHANGES)):
    """A schedule of a few tokens and ranks, with what it is made from; some blocks away from home."""
    seq_len, ranks = draw(st.integers(1, 30)), draw(st.integers(1, 6))
    mask = draw(any_mask(seq_len))
    layout = LAYOUTS[draw(st.sampled_from(["contiguous", "zigzag", "per_document", "round_robin"]))]
    owned = layout.assign(Workload(mask.slices(seq_len), seq_len, chunk=3), ranks)
    if draw(st.booleans()):  # a rank's pieces in another order than the sequence's
        owned = Ownership(seq_len, tuple(tuple(reversed(pieces)) for pieces in owned.pieces))
    if draw(st.booleans()):
        cuts = sorted(draw(st.lists(st.integers(0, seq_len), min_size=3, max_size=3)))
        keys = sorted(draw(st.lists(st.integers(0, seq_len), min_size=2, max_size=2)))
        to = draw(st.tuples(st.integers(0, ranks - 1), st.integers(0, ranks - 1)))
        rectangles = [(cuts[i], cuts[i + 1], *keys, to[i]) for i in range(2)]
        owned = dataclasses.replace(owned, moved=tuple(r for r in rectangles if r[0] < r[1] and r[2] < r[3]))
    exchange = draw(st.sampled_from(exchanges))
    # Elementwise slices count whole, so the definition sees what the slices see.
    slices = mask.slices(seq_len)
    seen = np.zeros((seq_len, seq_len), dtype=bool)
    i, j = np.indices(seen.shape)
    for q0, q1, k0, k1, lo, hi, _ in slices.tolist():
        seen |= (q0 <= i) & (i < q1) & (k0 <= j) & (j < k1) & (lo <= j - i) & (j - i <= hi)
    return make_schedule(slices, owned, exchange), seen


def rows_of(fragments: np.ndarray) -> list[tuple[int, int, int, int]]:
    return [
        (f[RANK], f[STAGE], f[OWNER], row) for f in fragments.tolist() for row in range(f[START], f[STOP])
    ]


@given(schedules(DEFINED))
@settings(max_examples=300)
def test_fragments_are_those_of_the_definition(made):
    s, seen = made
    expected = stages_of_keys(seen, s.ownership, s.exchange)
    assert s.last_stage == max((stage for _, stage in expected), default=0)
    everything = []
    for rank in range(s.ownership.num_ranks):
        mine = [as_rows(keys, *key, s.ownership) for key, keys in sorted(expected.items()) if key[0] == rank]
        found = s.received(rank)
        assert rows_of(found) == [row for rows in mine for row in rows]
        for stage in range(1, s.last_stage + 1):  # laid end to end
            part = found[found[:, STAGE] == stage]
            assert (
                part[:, OFFSET].tolist() == [0, *np.cumsum(part[:, STOP] - part[:, START])[:-1]][: len(part)]
            )
        everything += rows_of(found)
    for owner in range(s.ownership.num_ranks):
        theirs = [row for row in everything if row[2] == owner]
        # Both list a buffer's rows in its order: what is sent arrives where it belongs.
        assert rows_of(s.lent(owner)) == sorted(theirs, key=lambda row: row[:2])


@given(schedules())
@settings(max_examples=150)
def test_one_ranks_tiles_are_those_of_all_ranks(made):
    s, seen = made
    every = s.all_tiles
    one_by_one = [s.tiles_alone(rank) for rank in range(s.ownership.num_ranks)]
    assert np.concatenate(one_by_one).tolist() == every.tolist()
    assert int(area(every).sum()) == int(seen.sum())
    assert every[:, tile.STAGE].max(initial=0) < s.num_stages
    later = 1 + s.last_stage
    assert s.num_stages == later + bool((every[:, tile.STAGE] == later).any())


@given(st.data())
@settings(max_examples=100)
def test_global_figures_are_sums_over_the_ranks(data):
    seq_len = data.draw(st.integers(1, 40))
    plan = plan_attention(
        seq_len=seq_len,
        ranks=data.draw(st.integers(1, 6)),
        mask=data.draw(any_mask(seq_len)),
        layout=data.draw(st.sampled_from(sorted(LAYOUTS))),
        exchange=data.draw(st.sampled_from(EXCHANGES)),
        chunk=3,
    )
    row = plan.rows[0]
    arrives, leaves = traffic(row)
    peak = peak_stage_rows(row)
    for rank in range(plan.num_ranks):
        stages = row.rank(rank).stages
        sizes = [0 if stage.local else stage.kv_rows for stage in stages] + [0]
        assert arrives[rank, 0] == sum(sizes)
        assert leaves[rank, 0] == sum(b - a for stage in stages for _, a, b in stage.sends)
        assert peak[rank] == max(a + b for a, b in itertools.pairwise(sizes))


def test_a_thousand_ranks_keep_no_pairs_of_ranks():
    """What a plan holds grows with the ranks, not with their square."""

    def kept(s: Schedule) -> int:
        return s.rows.size + s.queries.size + sum(len(column) for column in s.needs.remote)

    for exchange in ("sparse", "ring"):
        sizes = []
        for ranks in (128, 1024):
            plan = plan_attention(seq_len=1 << 17, ranks=ranks, layout="zigzag", exchange=exchange)
            route = BoundRow(plan.rows[0], 3, range(ranks), (3,))
            assert len(route.plan.stages) == (ranks if exchange == "ring" else 3)
            sizes.append(kept(plan.rows[0].schedule))
        assert sizes[1] <= 9 * sizes[0]


intervals = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9), st.integers(0, 9)), max_size=12)


@given(intervals)
def test_least_over_and_covered_before(drawn):
    start, size, value = np.array(drawn, dtype=np.int64).reshape(-1, 3).T
    found = {}
    for a, b, least in zip(
        *(column.tolist() for column in least_over(start, start + size, value)), strict=True
    ):
        found |= dict.fromkeys(range(a, b), least)
    covers = {x: [v for a, n, v in drawn if a <= x < a + n] for x in range(30)}
    assert found == {x: min(values) for x, values in covers.items() if values}
    before = covered_before(start, start + size, np.arange(31))
    assert before.tolist() == [0, *np.cumsum([len(covers[x]) for x in range(30)])]


bounds = st.integers(0, 12)
low, high = st.integers(-14, 14) | st.just(-UNBOUNDED), st.integers(-14, 14) | st.just(UNBOUNDED)
slices_ = st.tuples(bounds, bounds, bounds, bounds, low, high, st.just(0))
cuts_ = st.tuples(st.integers(0, 3), bounds, bounds, bounds, bounds)


@given(st.lists(slices_, max_size=5), st.tuples(bounds, bounds, bounds, bounds))
def test_one_slice_is_like_many(drawn, rectangle):
    many = np.array(drawn, dtype=np.int64).reshape(-1, 7)
    one = [kept for row in drawn if (kept := tighten_one(*row)) is not None]
    assert one == [tuple(row) for row in tighten(many).tolist()]
    assert [area_of_one(*row) for row in one] == area(tighten(many)).tolist()
    if rectangle[0] < rectangle[1] and rectangle[2] < rectangle[3]:
        left = subtract(tighten(many), make_slices(rectangle))
        assert sum(area_of_one(*row) for row in subtract_rectangle(one, rectangle)) == area(left).sum()


@given(st.lists(slices_, min_size=1, max_size=4), st.lists(cuts_, max_size=6))
def test_rectangles_cut_out_of_their_own_slices(drawn, cuts):
    many = tighten(np.array(drawn, dtype=np.int64).reshape(-1, 7))
    cuts = sorted(c for c in cuts if c[0] < len(many) and c[1] < c[2] and c[3] < c[4])
    which, rectangles = (
        np.array(cuts, dtype=np.int64).reshape(-1, 5)[:, [0]],
        np.array(cuts).reshape(-1, 5)[:, 1:],
    )
    found = subtract_each(many, which[:, 0], rectangles)
    expected = [
        subtract(many[i : i + 1], make_slices(*(c[1:] for c in cuts if c[0] == i))) for i in range(len(many))
    ]

    def pairs(slices: np.ndarray) -> np.ndarray:
        total = np.zeros((12, 12), dtype=int)
        i, j = np.indices(total.shape)
        for q0, q1, k0, k1, lo, hi, _ in slices.tolist():
            total += (q0 <= i) & (i < q1) & (k0 <= j) & (j < k1) & (lo <= j - i) & (j - i <= hi)
        return total

    assert (pairs(found) == pairs(np.concatenate([many[:0], *expected]))).all()


def test_what_is_worked_out_goes_with_its_owner():
    row = dataclasses.replace(plan_attention(seq_len=8, ranks=2, layout="zigzag", exchange="sparse").rows[0])
    schedule = dataclasses.replace(row.schedule)
    assert schedule.tiles(1) is schedule.tiles(1) and row.rank(0) is row.rank(0)
    gone = [weakref.ref(row), weakref.ref(schedule), weakref.ref(schedule.needs)]
    assert schedule.needs.dealt(2) is schedule.needs.dealt(2)
    del row, schedule
    assert [ref() for ref in gone] == [None, None, None]
