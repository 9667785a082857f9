"""Placement, pages and prefixes: arithmetic and bookkeeping, against counting token by token."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from longmesh.cache.bookkeeping import Book, FreePages
from longmesh.cache.moving import Moving, places_of
from longmesh.cache.placement import PagePlacement, without
from longmesh.cache.plan import CacheStep
from longmesh.cache.prefix import PrefixIndex, page_hashes
from longmesh.cache.remesh import adopt, plan_remesh
from longmesh.errors import LongmeshError
from longmesh.plan import named_cluster

sizes = st.tuples(st.integers(1, 5), st.sampled_from([1, 2, 3, 16, 256]), st.integers(0, 2000))


@given(sizes)
def test_local_counts_the_tokens_of_a_rank(size):
    width, page, length = size
    placement = PagePlacement(tuple(range(width)), page)
    owners = [p // page % width for p in range(length)]
    for slot in range(width):
        mine = [p for p in range(length) if owners[p] == slot]
        assert placement.local(slot, length) == len(mine)
        assert [placement.position(slot, i) for i in range(len(mine))] == mine
        assert placement.num_pages(slot, length) == len({p // page for p in mine})
    assert [placement.owner(p) for p in range(length)] == owners


def test_local_after_tokens_were_taken_back_is_not_a_difference():
    placement = PagePlacement((0, 1), page=2)
    assert placement.local(1, 4) == 2
    assert placement.local(1, 4 - 3) == 0  # and not 2 - 3


@given(st.integers(0, 30), st.integers(0, 30), st.lists(st.integers(0, 30), max_size=6))
def test_without_is_set_difference(start, stop, ends):
    ends = sorted(set(ends))
    hidden = list(zip(ends[::2], ends[1::2], strict=False))
    left = without((start, stop), hidden)
    gone = {p for a, b in hidden for p in range(a, b)}
    assert [p for a, b in left for p in range(a, b)] == [p for p in range(start, stop) if p not in gone]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 100)), max_size=80))
def test_a_ledger_never_gives_a_page_twice(moves):
    ledger, held = FreePages(12), []
    for takes, number in moves:
        if takes and ledger.num_free:
            page = ledger.take(held[number % len(held)] if held else None)
            assert page not in held
            held.append(page)
        elif held:
            assert ledger.drop(held.pop(number % len(held)))
        assert ledger.num_used == len(held)
    for page in held:
        ledger.drop(page)
    assert [ledger.take(i - 1 if i else None) for i in range(12)] == list(range(12))


def test_pages_of_a_growing_sequence_lie_in_a_row_beside_another_one():
    book = Book(2, 64, 4)
    one, two = book.new(), book.new()
    for _ in range(12):
        book.extend([(one, 4), (two, 4)])
    assert [len(one.runs(slot)) for slot in (0, 1)] == [1, 1]
    assert [len(two.runs(slot)) for slot in (0, 1)] == [1, 1]


def test_a_shared_page_is_copied_before_it_is_written():
    book = Book(2, 8, 4)
    one = book.new()
    assert book.extend([(one, 6)]) == []
    two = book.fork(one)
    (copy,) = book.extend([(two, 1)])
    assert (copy.rank, copy.source) == (1, one.tables[1][0])
    assert two.tables == [one.tables[0], [copy.target]]
    assert book.extend([(one, 1)]) == []  # nobody shares it any more
    book.free(one)
    book.free(two)
    assert book.num_used == 0


def test_reorder_forks_what_comes_again_and_frees_what_does_not():
    book = Book(3, 8, 2)
    sequences = [book.new() for _ in range(3)]
    book.extend([(s, n) for s, n in zip(sequences, (5, 2, 7), strict=True)])
    found = book.reorder(sequences, [2, 2, 0])
    assert [len(s) for s in found] == [7, 7, 5]
    assert found[0] is sequences[2] and found[1] is not found[0] and found[1].tables == found[0].tables
    with pytest.raises(
        LongmeshError, match=r"this sequence was freed; make another one with pool.sequence\(\)"
    ):
        book.fork(sequences[1])
    for sequence in found:
        book.free(sequence)
    assert book.num_used == 0


def test_a_full_pool_says_so_and_changes_nothing():
    book = Book(2, 2, 4)
    one, two = book.new(), book.new()
    book.extend([(one, 9)])
    before = [list(table) for table in one.tables]
    with pytest.raises(
        LongmeshError, match=r"the pool is full: rank 0 needs 2 pages of 4 tokens .* has 0 of 2 left"
    ):
        book.extend([(one, 3), (two, 12)])
    assert (one.tables, len(one), len(two)) == (before, 9, 0)


def test_wrong_calls_are_refused():
    book, beside = Book(2, 2, 4), Book(2, 2, 4)
    one, other = book.new(), beside.new()
    book.extend([(one, 3)])
    beside.extend([(other, 3)])
    for call, text in (
        (lambda: book.crop(one, 4), "crop to 4 tokens: the sequence has 3; give 0 to 3"),
        (lambda: book.extend([(one, -1)]), "a step of -1 tokens; give a whole number, 0 or more"),
        (lambda: book.extend([(one, 1), (one, 1)]), "a step has the same sequence twice"),
        (lambda: book.reorder([one], [1]), r"reorder \[1\]: there are 1 sequences, 0 to 0"),
        (
            lambda: book.new(3),
            "a sequence over width=3 ranks; this pool has 2, so give 1 to 2, or None for all",
        ),
        (lambda: Book(2, 2, 0), "PagePool: page=0; give a whole number, 1 or more"),
        (lambda: Book(2, -1, 4), "PagePool: num_pages=-1; give a whole number, 0 or more"),
        (lambda: Book(2, 2, 4, window=0), "PagePool: window=0; give a whole number, 1 or more"),
        (lambda: book.reorder([one, one], [0]), "reorder: the same sequence is given twice"),
        (
            lambda: book.fork(other),
            "this sequence is one of another pool; make one with this pool's sequence",
        ),
        (lambda: book.extend([(other, 1)]), "this sequence is one of another pool"),
        (lambda: PrefixIndex(book).remember(one, [1]), "was given 1 tokens of a sequence of 3"),
    ):
        with pytest.raises(LongmeshError, match=text):
            call()


def test_pages_that_no_window_sees_are_given_back():
    book = Book(3, 8, 2, window=5)
    index = PrefixIndex(book)
    one = book.new()
    book.extend([(one, 7)])
    index.remember(one, list(range(7)))
    branch = book.fork(one)
    for length in range(8, 60):
        book.extend([(one, 1)])
        held = [place for _, place in places_of(one)]
        assert len(one) == length and len(held) <= 4 and len(set(held)) == len(held)
        assert one.first_page * 2 <= max(0, length - 5)  # the first key that the token sees
    with pytest.raises(
        LongmeshError, match=r"crop to 30 tokens: pages that no window of 5 tokens .* give 58 or more, or 0"
    ):
        book.crop(one, 30)
    book.crop(one, 58)
    adopt(book, plan_remesh(book, 2, 30, None))
    assert [len(table) for table in one.tables] == [15, 14] and [page for _, (_, page) in places_of(one)]
    assert index.find(list(range(7))) is not None  # of the branch
    for sequence in list(book.live.values()):
        book.free(sequence)
    assert book.num_used == 0 and branch.is_free


def test_sequences_begin_where_the_fewest_pages_are():
    book = Book(3, 100, 4)
    for length in (1, 1, 1, 9, 2):
        book.extend([(book.new(), length)])
    used = [ledger.num_used for ledger in book.ledgers]
    assert max(used) - min(used) <= 1


def test_equal_beginnings_share_their_full_pages():
    book = Book(2, 10, 4)
    index = PrefixIndex(book)
    tokens = list(range(11))
    one = book.new()
    book.extend([(one, 11)])
    index.remember(one, tokens)
    two = index.find([*range(8), 99, 98, 97, 96])
    assert two is not None
    assert (len(two), two.tables) == (8, [one.tables[0][:1], one.tables[1][:1]])
    assert index.find([1, 2, 3, 4]) is None
    book.free(one)
    book.free(two)
    assert book.num_used == 0
    assert index.find(tokens) is None
    three = book.new()
    book.extend([(three, 8)])
    index.remember(three, tokens[:8])
    book.crop(three, 6)
    book.extend([(three, 1)])  # writes into page 1 again
    found = index.find(tokens)
    assert found is not None and len(found) == 4
    assert page_hashes([1, 2, 3, 4], 2)[0] == page_hashes([1, 2, 9, 9], 2)[0]
    assert page_hashes([1, 2, 3, 4], 2)[1] != page_hashes([9, 9, 3, 4], 2)[1]


def test_beginnings_of_another_width_are_not_shared_where_one_is_asked():
    book = Book(3, 20, 2)
    index = PrefixIndex(book)
    narrow, wide = book.new(1), book.new()
    book.extend([(narrow, 6), (wide, 4)])
    for sequence in (narrow, wide):
        index.remember(sequence, list(range(len(sequence))))
    for width, length, over in ((1, 6, 1), (3, 4, 3), (None, 6, 1)):
        found = index.find(list(range(9)), width)
        assert found is not None and (len(found), found.placement.width) == (length, over)
        book.free(found)
    assert index.find(list(range(9)), 2) is None
    book.moving = Moving(book, [narrow], wide.placement)
    book.moving.stage([9, 9, 9], [9, 9, 9])
    book.moving.finish()
    assert index.find(list(range(9)), 1) is None
    found = index.find(list(range(9)), 3)
    assert found is not None and len(found) == 6
    for sequence in list(book.live.values()):
        book.free(sequence)
    assert book.num_used == 0 and index.find(list(range(9))) is None


@given(
    st.integers(1, 4),
    st.sampled_from([1, 2, 5]),
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 7), st.integers(1, 4)), min_size=1, max_size=4),
    st.sampled_from([None, 1, 3, 8]),
)
def test_who_takes_part_follows_from_every_pair(ranks, page, sequences, window):
    book = Book(ranks, 200, page)
    entries = []
    for cached, new, width in sequences:
        sequence = book.new(min(width, ranks))
        book.extend([(sequence, cached)])
        book.extend([(sequence, new)])
        entries.append((sequence, new))
    plan = CacheStep.of(entries, ranks, named_cluster("cpu"))
    shares = plan.shares(window)
    for rank in range(ranks):
        rows = []
        for entry in plan.entries:
            seen = {
                p
                for q in range(entry.start, entry.stop)
                for p in range(0 if window is None else max(0, q - window + 1), q + 1)
                if entry.sequence.placement.owner(p) == rank
            }
            rows += range(entry.row, entry.row + entry.num_tokens) if seen else []
            found = [keys for keys in shares.keys(rank) if keys.entry is entry]
            assert len(found) == bool(seen)
            for _, slot, spans in found:
                at = [entry.sequence.placement.position(slot, i) for a, b in spans for i in range(a, b)]
                assert at == sorted(seen)
        assert np.array_equal(shares.rows(rank), rows)
        assert shares.num_rows[rank] == len(rows)
    writes = [(rank, w) for rank in range(ranks) for w in plan.writes(rank)]
    assert sorted(w.row + i for _, w in writes for i in range(w.num_tokens)) == list(range(plan.num_rows))
    for rank, (row, _, number, offset) in writes:
        entry = next(e for e in plan.entries if e.row <= row < e.row + e.num_tokens)
        position, placement = entry.start + row - entry.row, entry.sequence.placement
        slot = placement.ranks.index(rank)
        assert position == placement.position(slot, entry.sequence.tables[slot].index(number) * page + offset)
