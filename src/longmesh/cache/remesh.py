"""A pool's move to another mesh of the same world: more ranks, fewer, or others. Exact: pages are copied bit by bit.

    mesh of ranks 0 1       pages on   0 1 0 1 0     every rank of the larger mesh calls it; those that are not
    mesh of ranks 0 1 2 3   pages on   0 1 2 3 0     in the smaller one have kept the books all along

Where pages lie afterwards follows from the books, so only pages travel, layer by layer: one layer is held twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from longmesh.cache.bookkeeping import Book, FreePages
from longmesh.cache.member import Member
from longmesh.cache.moving import PageTransfer, Place, families, places_of
from longmesh.cache.placement import PagePlacement
from longmesh.cache.rebalance import send_pages
from longmesh.cache.store import PageShape, PageStore
from longmesh.comm import AxisGroup, collectives
from longmesh.comm.agree import agree
from longmesh.errors import LongmeshError

if TYPE_CHECKING:
    from longmesh.cache.pool import PagePool

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


class _MoveSignature(NamedTuple):
    books: str
    old_ranks: tuple[int, ...]
    new_ranks: tuple[int, ...]
    num_pages: int


class Remesh(NamedTuple):
    """A move that is planned: new ledgers, each sequence's placement by its name, and where each page goes."""

    ledgers: list[FreePages]
    placements: dict[int, PagePlacement]
    pages: dict[Place, Place]


def plan_remesh(book: Book, num_ranks: int, num_pages: int, width_of: Callable[[int], int] | None) -> Remesh:
    """Deal all sequences out over `num_ranks` ranks with `num_pages` pages each. Pure; the book stays as it is.

    `width_of` gives the width of a length, for sequences whose width is by cost.
    """
    new = Book(num_ranks, num_pages, book.page, book.window)
    placements: dict[int, PagePlacement] = {}
    pages: dict[Place, Place] = {}
    for family in families(book.live.values()):
        width = num_ranks if family[0].width is None else min(family[0].width, num_ranks)
        if family[0].by_cost and width_of is not None:
            width = max(width_of(sequence.length) for sequence in family)
        placement = new.place(width)
        placements |= {sequence.name: placement for sequence in family}
        last: dict[int, int] = {}
        numbers = {place: number for sequence in family for number, place in places_of(sequence)}
        for place in sorted(numbers, key=lambda p: (numbers[p], p)):
            rank = placement.ranks[numbers[place] % width]
            if not new.ledgers[rank].num_free:
                raise LongmeshError(
                    f"PagePool.move_to: {num_pages} pages on each of {num_ranks} ranks do not hold the {book.num_used} "
                    "pages in use; give a larger num_pages=, or free sequences first"
                )
            last[rank] = new.ledgers[rank].take(last.get(rank))
            pages[place] = (rank, last[rank])
    return Remesh(new.ledgers, placements, pages)


def adopt(book: Book, remesh: Remesh) -> None:
    """The book becomes what was planned. Its sequences stay the same objects."""
    if book.moving is not None:
        book.moving.cancel()
    held: set[Place] = set()
    owner: dict[Place, PagePlacement] = {}
    for sequence in book.live.values():
        placement = remesh.placements[sequence.name]
        tables = sequence.empty_tables(placement)
        for number, place in list(places_of(sequence)):
            rank, page = remesh.pages[place]
            tables[number % placement.width].append(page)
            if place in held:
                remesh.ledgers[rank].share(page)
            held.add(place)
            owner[place] = placement
        sequence.lie(placement, tables, len(remesh.ledgers))
    book.ledgers = remesh.ledgers
    book.tell_moved({place: (owner[place], *remesh.pages[place]) for place in owner})


def move_pool(pool: PagePool, mesh: DeviceMesh, num_pages: int | None) -> None:
    """`PagePool.move_to`. Collective: every rank of the larger of both meshes."""
    if mesh is None or pool.mesh is None:
        raise LongmeshError("PagePool.move_to: from a mesh to a mesh, not from or to None; make another pool")
    old, new = pool.member, Member(mesh)
    group = _outer_group(old, new)
    num_pages = pool.book.ledgers[0].num_pages if num_pages is None else num_pages
    error, remesh = None, None
    try:
        if pool.open_step is not None:
            raise LongmeshError("PagePool.move_to: the step was not committed; call its commit() first")
        remesh = plan_remesh(pool.book, new.size, num_pages, pool.width_of(new.size))
    except LongmeshError as found:
        error = found
    if group is not None:
        signature = _MoveSignature(_digest(pool.book), old.global_ranks, new.global_ranks, num_pages)
        agree("PagePool.move_to", signature, error, group, str(pool.device))
    elif error is not None:
        raise error
    assert remesh is not None
    shapes = _shapes(pool, group)
    transfers: list[PageTransfer] = []
    if group is not None:
        place = {rank: i for i, rank in enumerate(group.global_ranks)}
        transfers = [
            PageTransfer(place[old.global_ranks[a]], page, place[new.global_ranks[b]], target)
            for (a, page), (b, target) in remesh.pages.items()
        ]
    for layer, shape in enumerate(shapes):
        if shape is None:
            continue
        before, after = pool.stores[layer], None
        if new.is_member:
            after = PageStore(shape, pool.page, pool.device)
            after.grow(num_pages)
        if group is not None:
            sources, targets = ([] if store is None else [store] for store in (before, after))
            send_pages(transfers, sources, targets, shape.page_bytes(pool.page), group, pool.device)
        pool.replace_store(layer, shape, after)
    adopt(pool.book, remesh)
    pool.agreed.clear()
    pool.member, pool.has_agreed = new, False  # ranks that are new may have sampled differently


def _outer_group(old: Member, new: Member) -> AxisGroup | None:
    """The group of the mesh that has all ranks of both; None on a rank that is in neither."""
    if set(old.global_ranks) <= set(new.global_ranks):
        return new.group
    if set(old.global_ranks) >= set(new.global_ranks):
        return old.group
    raise LongmeshError(
        f"PagePool.move_to: from ranks {list(old.global_ranks)} to ranks {list(new.global_ranks)}: one mesh must have "
        "all ranks of the other, since pages travel in its group; move to a mesh of all of them first"
    )


def _digest(book: Book) -> str:
    held = [(s.name, s.length, s.hidden, s.placement, s.tables, s.by_cost) for s in book.live.values()]
    return hashlib.blake2b(repr((book.page, held)).encode(), digest_size=8).hexdigest()


def _shapes(pool: PagePool, group: AxisGroup | None) -> list[PageShape | None]:
    """Of every layer that some rank holds. Collective."""
    mine = [(-1,) * 4 if shape is None else (*shape[:3], _DTYPES.index(shape[3])) for shape in pool.shapes]
    if group is not None and mine:
        told = torch.tensor(mine, dtype=torch.int64, device=pool.device)
        mine = collectives.all_reduce(told, reduce_op="max", group=group).tolist()
    return [None if row[0] < 0 else PageShape(row[0], row[1], row[2], _DTYPES[row[3]]) for row in mine]
