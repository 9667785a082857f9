"""Moving pages between ranks until all hold about as many, as many bytes at a time as a step can spare.

What moves where follows from the books (`balance`, `moving`); here it is sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from longmesh.cache.balance import choose_move
from longmesh.cache.moving import Moving
from longmesh.cache.transfer import send_pages
from longmesh.comm.agree import agree
from longmesh.errors import LongmeshError

if TYPE_CHECKING:
    from longmesh.cache.pool import PagePool


class _Signature(NamedTuple):
    max_bytes: int
    page_bytes: int


def rebalance(pool: PagePool, max_bytes: int) -> int:
    """`PagePool.rebalance`: the bytes that all ranks sent together. Collective, if there is something to move."""
    size = pool.page_bytes
    error = _find_problem(pool, max_bytes, size)
    move = _next_move(pool)
    if move is not None and pool.group is not None:
        agree("PagePool.rebalance", _Signature(max_bytes, size), error, pool.group, str(pool.device))
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
