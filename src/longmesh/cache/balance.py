"""Which sequences should move so that ranks hold as many pages; and how many ranks a sequence should use. Pure.

Sequences over all ranks are balanced by themselves. Others are not: when some of them are freed, or grow more than
expected, one rank may hold far more than the rest, and runs out of pages first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from longmesh.cache.moving import families, places_of
from longmesh.cache.placement import Placement
from longmesh.cache.sequence import Sequence
from longmesh.plan import Cluster

if TYPE_CHECKING:
    from longmesh.cache.book import Book

_EVEN = 1.02  # pages of the fullest rank / mean; one page more is always allowed


def width_by_cost(length: int, num_ranks: int, key_bytes: int, result_bytes: int, cluster: Cluster) -> int:
    """Over how many ranks a sequence of `length` tokens is attended fastest: reading its keys, sending partial results.

    `key_bytes` of a token, `result_bytes` of a query, in one layer.
    """
    memory = cluster.levels[0].link

    def time_us(width: int) -> float:
        sent = cluster.collective_us("all_gather", (width,), (0,), (width - 1) * result_bytes)
        return memory.time_us(length / width * key_bytes) + (sent if width > 1 else 0.0)

    return min(range(1, num_ranks + 1), key=lambda width: (time_us(width), width))


def choose_move(book: Book, width_of: Callable[[int], int] | None) -> tuple[list[Sequence], Placement] | None:
    """The next family to move and where to, None if ranks hold as much as each other already.

    First those that have outgrown the width that they were given by cost, `width_of` their length. Then what takes most
    off the fullest rank for each page that is moved. The sum of squares of all ranks' pages falls with every such move.
    """
    used = [ledger.num_used for ledger in book.ledgers]
    groups = [family for family in families(book.live.values()) if any(s.length for s in family)]
    for family in groups:
        placement = None if width_of is None else _widened(family, used, width_of)
        if placement is not None and _fits(book, family, placement):
            return family, placement
    total, count = sum(used), len(used)
    fullest = used.index(max(used))
    if used[fullest] * count <= total * _EVEN + count:
        return None
    best: tuple[float, list[Sequence], Placement] | None = None
    for family in groups:
        placement = family[0].placement
        if fullest not in placement.ranks:
            continue
        held = _pages_by_rank(family, placement)
        for other in range(count):
            less = held.get(fullest, 0) - held.get(other, 0)
            gain = less * (used[fullest] - used[other] - less)
            if other == fullest or gain <= 0:
                continue
            score = gain / (held.get(fullest, 0) + held.get(other, 0))
            swapped = Placement(_swapped(placement.ranks, fullest, other), placement.page)
            if (best is None or score > best[0]) and _fits(book, family, swapped):
                best = score, family, swapped
    return None if best is None else best[1:]


def _swapped(ranks: tuple[int, ...], one: int, other: int) -> tuple[int, ...]:
    names = {one: other, other: one}
    return tuple(names.get(rank, rank) for rank in ranks)


def _widened(family: list[Sequence], used: list[int], width_of: Callable[[int], int]) -> Placement | None:
    """The placement of a family that has outgrown its own."""
    if not all(sequence.by_cost for sequence in family):
        return None
    placement = family[0].placement
    width = max(width_of(sequence.length) for sequence in family)
    if width <= placement.width:
        return None
    others = [rank for rank in range(len(used)) if rank not in placement.ranks]
    others.sort(key=lambda rank: (used[rank], rank))
    return Placement((*placement.ranks, *others[: width - placement.width]), placement.page)


def _pages_by_rank(family: list[Sequence], placement: Placement) -> dict[int, int]:
    """How many pages of a family each rank would hold."""
    found: dict[int, int] = {}
    places = {place: number for sequence in family for number, place in places_of(sequence)}
    for number in places.values():
        rank = placement.ranks[number % placement.width]
        found[rank] = found.get(rank, 0) + 1
    return found


def _fits(book: Book, family: list[Sequence], placement: Placement) -> bool:
    """Whether the ranks have room for the copies beside the pages that are there until all are made."""
    coming: dict[int, int] = {}
    for place, number in {p: n for sequence in family for n, p in places_of(sequence)}.items():
        rank = placement.ranks[number % placement.width]
        if rank != place[0]:
            coming[rank] = coming.get(rank, 0) + 1
    return all(pages <= book.ledgers[rank].num_free for rank, pages in coming.items())
