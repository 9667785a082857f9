"""Moving pages between ranks until all hold about as many, as many bytes at a time as a step can spare.

Which sequences move, and how many ranks a sequence should use, is pure arithmetic over the books; then pages are sent.

Sequences over all ranks are balanced by themselves. Others are not: when some of them are freed, or grow more than
expected, one rank may hold far more than the rest, and runs out of pages first.

A page is sent as its bytes, all layers of it one after another, so that nothing is rounded or reordered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Listed
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longmesh.cache.moving import PageTransfer, families, places_of
from longmesh.cache.placement import PagePlacement
from longmesh.cache.sequence import Sequence
from longmesh.cache.store import PageStore
from longmesh.comm import AxisGroup, collectives
from longmesh.plan import Cluster

if TYPE_CHECKING:
    from longmesh.cache.bookkeeping import Book
from typing import TYPE_CHECKING, NamedTuple

from longmesh.cache.moving import Moving
from longmesh.comm.agree import agree
from longmesh.errors import LongmeshError

if TYPE_CHECKING:
    from longmesh.cache.pool import PagePool


def send_pages(
    transfers: Listed[PageTransfer],
    sources: Listed[PageStore],
    targets: Listed[PageStore],
    page_bytes: int,
    group: AxisGroup | None,
    device: torch.device | str,
) -> None:
    """Copy pages; the ranks of `transfers` are places in the group. Collective: every rank of the group.

    `sources`, `targets`: this rank's layers, old and new; `page_bytes` is a page of all of them. A rank that sends or
    receives nothing needs none.
    """
    rank = 0 if group is None else group.rank
    for transfer in transfers:
        if transfer.source == transfer.target == rank:
            for source, target in zip(sources, targets, strict=True):
                for new, old in zip(
                    target.parts(transfer.target_page), source.parts(transfer.page), strict=True
                ):
                    new.copy_(old)
    if group is None or group.size == 1:
        return
    away = [t for t in transfers if t.source != t.target]
    sent = sorted((t for t in away if t.source == rank), key=lambda t: t.target)  # stable: in the order given
    come = sorted((t for t in away if t.target == rank), key=lambda t: t.source)
    rows = [_as_bytes(part) for t in sent for store in sources for part in store.parts(t.page)]
    received = collectives.all_to_all(
        torch.cat(rows) if rows else torch.empty(0, dtype=torch.uint8, device=device),
        recv_counts=[sum(t.source == other for t in come) * page_bytes for other in range(group.size)],
        send_counts=[sum(t.target == other for t in sent) * page_bytes for other in range(group.size)],
        group=group,
    )
    at = 0
    for part in (part for t in come for store in targets for part in store.parts(t.target_page)):
        stop = at + part.numel() * part.element_size()
        part.copy_(
            received[at:stop].clone().view(part.dtype).view(part.shape)
        )  # a copy lies on a whole number
        at = stop


def _as_bytes(part: Tensor) -> Tensor:
    return part.reshape(-1).view(torch.uint8)


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


def choose_move(
    book: Book, width_of: Callable[[int], int] | None
) -> tuple[list[Sequence], PagePlacement] | None:
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
    best: tuple[float, list[Sequence], PagePlacement] | None = None
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
            swapped = PagePlacement(_swapped(placement.ranks, fullest, other), placement.page)
            if (best is None or score > best[0]) and _fits(book, family, swapped):
                best = score, family, swapped
    return None if best is None else best[1:]


def _swapped(ranks: tuple[int, ...], one: int, other: int) -> tuple[int, ...]:
    names = {one: other, other: one}
    return tuple(names.get(rank, rank) for rank in ranks)


def _widened(family: list[Sequence], used: list[int], width_of: Callable[[int], int]) -> PagePlacement | None:
    """The placement of a family that has outgrown its own."""
    if not all(sequence.by_cost for sequence in family):
        return None
    placement = family[0].placement
    width = max(width_of(sequence.length) for sequence in family)
    if width <= placement.width:
        return None
    others = [rank for rank in range(len(used)) if rank not in placement.ranks]
    others.sort(key=lambda rank: (used[rank], rank))
    return PagePlacement((*placement.ranks, *others[: width - placement.width]), placement.page)


def _pages_by_rank(family: list[Sequence], placement: PagePlacement) -> dict[int, int]:
    """How many pages of a family each rank would hold."""
    found: dict[int, int] = {}
    places = {place: number for sequence in family for number, place in places_of(sequence)}
    for number in places.values():
        rank = placement.ranks[number % placement.width]
        found[rank] = found.get(rank, 0) + 1
    return found


def _fits(book: Book, family: list[Sequence], placement: PagePlacement) -> bool:
    """Whether the ranks have room for the copies beside the pages that are there until all are made."""
    coming: dict[int, int] = {}
    for place, number in {p: n for sequence in family for n, p in places_of(sequence)}.items():
        rank = placement.ranks[number % placement.width]
        if rank != place[0]:
            coming[rank] = coming.get(rank, 0) + 1
    return all(pages <= book.ledgers[rank].num_free for rank, pages in coming.items())


class _RebalanceSignature(NamedTuple):
    max_bytes: int
    page_bytes: int


def rebalance(pool: PagePool, max_bytes: int) -> int:
    """`PagePool.rebalance`: the bytes that all ranks sent together. Collective, if there is something to move."""
    size = pool.page_bytes
    error = _find_problem(pool, max_bytes, size)
    move = _next_move(pool)
    if move is not None and pool.group is not None:
        agree("PagePool.rebalance", _RebalanceSignature(max_bytes, size), error, pool.group, str(pool.device))
    elif error is not None:
        raise error
    spare = max_bytes // max(size, 1)
    sent, received, count = [spare] * pool.num_ranks, [spare] * pool.num_ranks, 0
    while move is not None:
        transfers, is_whole = move.stage(sent, received)
        if transfers and pool.member.is_member:
            stores = [store for store in pool.stores if store is not None]
            send_pages(transfers, stores, stores, size, pool.group, pool.device)
        count += len(transfers)
        if not is_whole:
            break
        move.finish()
        move = _next_move(pool)
    return count * size


def _next_move(pool: PagePool) -> Moving | None:
    """The move that is under way, or the next one."""
    book = pool.book
    if book.moving is None:
        chosen = choose_move(book, pool.width_of(pool.num_ranks))
        book.moving = None if chosen is None else Moving(book, *chosen)
    return book.moving


def _find_problem(pool: PagePool, max_bytes: int, size: int) -> LongmeshError | None:
    if pool.open_step is not None:
        return LongmeshError("PagePool.rebalance: the step was not committed; call its commit() first")
    if not pool.member.is_member and any(shape is None for shape in pool.shapes):
        return LongmeshError(
            "PagePool.rebalance: this rank is not in the pool's mesh and does not know how large its pages are; give "
            "PagePool kv_heads= and head_dim="
        )
    if max_bytes < size or not isinstance(max_bytes, int):
        return LongmeshError(
            f"PagePool.rebalance: max_bytes={max_bytes!r}; a page of {pool.page} tokens is {size} bytes in all layers, "
            "so give that or more"
        )
    return None
