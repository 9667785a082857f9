"""Rebalancing and moves to other meshes, in the books alone: what is chosen, staged, given back and kept."""

import pytest
from hypothesis import given, strategies as st

from longmesh.cache.bookkeeping import Book
from longmesh.cache.moving import Moving, families, places_of
from longmesh.cache.prefix import PrefixIndex
from longmesh.cache.rebalance import choose_move, width_by_cost
from longmesh.cache.remesh import adopt, plan_remesh
from longmesh.errors import LongmeshError
from longmesh.plan import named_cluster

CPU = named_cluster("cpu")


def filled(book: Book, *sizes: tuple[int | None, int]):
    found = []
    for width, length in sizes:
        found.append(book.new(width))
        book.extend([(found[-1], length)])
    return found


def balance(book: Book, spare: int, width_of=None) -> list[int]:
    """Moves until nothing is left to move, `spare` pages at a time; how many pages each call moved."""
    counts = []
    while True:
        if book.moving is None:
            chosen = choose_move(book, width_of)
            if chosen is None:
                return counts
            book.moving = Moving(book, *chosen)
        transfers, is_whole = book.moving.stage([spare] * book.num_ranks, [spare] * book.num_ranks)
        counts.append(len(transfers))
        if is_whole:
            book.moving.finish()


def used(book: Book) -> list[int]:
    return [ledger.num_used for ledger in book.ledgers]


def test_short_sequences_belong_on_one_rank_and_long_ones_on_all():
    widths = [width_by_cost(length, 8, 4096, 2080, CPU) for length in (1, 100, 1000, 10_000, 100_000, 10**7)]
    assert widths == sorted(widths)
    assert (widths[0], widths[1], widths[-1]) == (1, 1, 8)


@given(
    st.integers(2, 5),
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 60)), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(0, 11),
)
def test_ranks_hold_as_much_as_each_other_after_a_rebalance(ranks, sizes, spare, freed):
    book = Book(ranks, 1000, 2)
    sequences = filled(book, *((min(width, ranks), length) for width, length in sizes))
    for sequence in sequences[: freed % len(sequences)]:
        book.free(sequence)
    lengths, before = {s.name: s.length for s in book.live.values()}, used(book)
    counts = balance(book, spare)
    assert all(count <= spare * ranks for count in counts)
    assert sum(used(book)) == sum(before) and max(used(book)) <= max(before)
    assert {s.name: s.length for s in book.live.values()} == lengths
    places = [place for s in book.live.values() for _, place in places_of(s)]
    assert len(places) == len(set(places)) == sum(used(book))
    for sequence in list(book.live.values()):
        book.free(sequence)
    assert book.num_used == 0


def test_one_rank_sequences_that_stay_after_frees_are_spread():
    book = Book(4, 1000, 1)
    sequences = filled(book, *[(1, 10)] * 40)
    for sequence in sequences:
        if sequence.placement.ranks[0] != 2:
            book.free(sequence)
    assert used(book) == [0, 0, 100, 0]
    balance(book, 7)
    assert max(used(book)) <= 30  # 25 is the mean, and a sequence has 10


def test_a_sequence_that_outgrew_its_width_is_spread():
    book = Book(4, 1000, 4)
    sequence = book.new(1, by_cost=True)
    book.extend([(sequence, 400)])
    balance(book, 3, lambda length: 4 if length > 100 else 1)
    assert sequence.placement.width == 4 and used(book) == [25] * 4


def test_a_copy_whose_page_is_written_or_freed_is_dropped():
    book = Book(3, 100, 4)
    one, other = filled(book, (1, 10), (1, 10))
    book.moving = Moving(book, [one], other.placement._replace(ranks=(2,)))
    transfers, is_whole = book.moving.stage([2, 2, 2], [2, 2, 2])
    assert (len(transfers), is_whole) == (2, False)
    book.crop(one, 6)  # page 1 is written again
    book.extend([(one, 1)])
    assert len(book.moving.staged) == 1
    transfers, is_whole = book.moving.stage([1, 1, 1], [1, 1, 1])
    assert (len(transfers), is_whole) == (1, True)
    book.crop(one, 0)
    assert book.moving.staged == {} and used(book) == [0, 3, 0]
    book.moving.finish()
    assert one.placement.ranks == (2,)


def test_forks_move_together_and_still_share():
    book = Book(3, 100, 4)
    (one,) = filled(book, (1, 10))
    book.moving = Moving(book, [one], one.placement._replace(ranks=(1, 2)))
    book.moving.stage([1] * 3, [1] * 3)
    branch = book.fork(one)
    book.extend([(branch, 5)])
    assert [len(family) for family in families(book.live.values())] == [2]
    book.moving.stage([9] * 3, [9] * 3)
    book.moving.finish()
    assert one.placement == branch.placement and one.tables[0][0] == branch.tables[0][0]
    assert used(book) == [
        0,
        3,
        2,
    ]  # pages 0 and 1 are shared, 2 is of each, 3 of the branch: 0, 2, 2' on rank 1


def test_copies_never_fill_a_pool():
    book = Book(2, 5, 1)
    (one,) = filled(book, (1, 3))
    book.moving = Moving(book, [one], one.placement._replace(ranks=(1,)))
    book.moving.stage([2, 2], [2, 2])
    wide = book.new()
    book.extend([(wide, 4)])
    assert book.moving is not None and used(book) == [5, 4]
    book.free(wide)
    (rival,) = filled(book, (1, 4))
    assert rival.placement.ranks == (1,) and book.moving is None and used(book) == [3, 4]


def test_equal_beginnings_are_found_where_they_moved_to():
    book = Book(2, 20, 4)
    index = PrefixIndex(book)
    (one,) = filled(book, (1, 12))
    index.remember(one, list(range(12)))
    book.moving = Moving(book, [one], one.placement._replace(ranks=(1,)))
    book.moving.stage([9, 9], [9, 9])
    book.moving.finish()
    two = index.find(list(range(9)))
    assert two is not None and (two.tables[0], two.placement) == (one.tables[0][:2], one.placement)
    adopt(book, plan_remesh(book, 3, 20, None))
    three = index.find(list(range(12)))
    assert three is not None and (three.tables, three.placement) == (one.tables, one.placement)


def test_a_move_to_fewer_ranks_that_cannot_hold_it_says_so():
    book = Book(3, 4, 2)
    (one,) = filled(book, (None, 20))
    before = [list(table) for table in one.tables]
    with pytest.raises(
        LongmeshError,
        match=r"PagePool.move_to: 4 pages on each of 2 ranks do not hold the 10 pages in use; give a larger num_pages=",
    ):
        plan_remesh(book, 2, 4, None)
    assert one.tables == before and used(book) == [4, 3, 3]
    adopt(book, plan_remesh(book, 2, 5, None))
    assert used(book) == [5, 5] and len(one) == 20
