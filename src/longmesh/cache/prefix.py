"""Finding pages that hold the beginning of a new sequence already, by hashes of their tokens. Pure.

A page's hash is made of its tokens and of the hash of the page before it, so that equal hashes are equal beginnings.
Only full pages of sequences that are alive are known; a page that is freed or written again is forgotten.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Listed

import numpy as np

from longmesh.cache.bookkeeping import Book
from longmesh.cache.moving import Moved
from longmesh.cache.placement import PagePlacement
from longmesh.cache.sequence import GONE, Sequence
from longmesh.errors import LongmeshError


def page_hashes(tokens: Listed[int], page: int) -> list[bytes]:
    """One for each full page of tokens; the same in every process."""
    found, before = [], b""
    numbers = np.asarray(tokens)
    if numbers.ndim != 1 or (len(numbers) and numbers.dtype.kind not in "iu"):
        raise LongmeshError(
            f"tokens of shape {numbers.shape} and type {numbers.dtype}; give the token ids of one sequence, whole "
            "numbers in a row"
        )
    numbers = numbers.astype(np.int64)
    for start in range(0, len(numbers) // page * page, page):
        before = hashlib.blake2b(before + numbers[start : start + page].tobytes(), digest_size=16).digest()
        found.append(before)
    return found


class PrefixIndex:
    """The full pages of a book by the hash of what they and those before them hold."""

    def __init__(self, book: Book) -> None:
        self._book = book
        # By hash and over how many ranks they lie: placement, rank and page; and the same the other way round.
        self._pages: dict[tuple[bytes, int], tuple[PagePlacement, int, int]] = {}
        self._hashes: dict[tuple[int, int], tuple[bytes, int]] = {}
        book.on_loss, book.on_move = self._forget, self._move

    def remember(self, sequence: Sequence, tokens: Listed[int]) -> None:
        """`tokens` are what the sequence holds; its full pages can be shared from now on."""
        self._book.check(sequence)
        if len(tokens) != sequence.length:
            raise LongmeshError(
                f"remember() was given {len(tokens)} tokens of a sequence of {sequence.length}; give all of them"
            )
        placement = sequence.placement
        for number, digest in enumerate(page_hashes(tokens, placement.page)):
            slot, key = number % placement.width, (digest, placement.width)
            rank, page = placement.ranks[slot], sequence.tables[slot][number // placement.width]
            if (
                page != GONE
                and key not in self._pages
                and (rank, page) not in self._hashes
                and not sequence.hidden
            ):
                self._pages[key] = (placement, rank, page)
                self._hashes[rank, page] = key

    def find(self, tokens: Listed[int], width: int | None = None) -> Sequence | None:
        """A sequence in the pages that hold the beginning of `tokens`, as far as it is known; None if nothing is.

        `width`: only pages of sequences over so many ranks (None: those that hold most of it, of the widest).
        """
        digests = page_hashes(tokens, self._book.page)
        widths = range(self._book.num_ranks, 0, -1) if width is None else (width,)
        placement, pages = max((self._known(digests, n) for n in widths), key=lambda known: len(known[1]))
        if placement is None:
            return None
        found = self._book.new_on(placement)
        for number, (rank, page) in enumerate(pages):
            self._book.ledgers[rank].share(page)
            found.tables[number % placement.width].append(page)
        found.length = len(pages) * placement.page
        return found

    def _known(self, digests: list[bytes], width: int) -> tuple[PagePlacement | None, list[tuple[int, int]]]:
        """The pages (rank and number) of one placement that hold a beginning with these hashes."""
        first: PagePlacement | None = None
        pages: list[tuple[int, int]] = []
        for digest in digests:
            placement, rank, page = self._pages.get((digest, width), (None, 0, 0))
            if placement is None or placement != (first or placement):
                break
            first = placement
            pages.append((rank, page))
        return first, pages

    def _forget(self, rank: int, page: int) -> None:
        key = self._hashes.pop((rank, page), None)
        if key is not None:
            del self._pages[key]

    def _move(self, moved: Moved) -> None:
        known = [(self._hashes.pop(old), new) for old, new in moved.items() if old in self._hashes]
        for key, _ in known:
            del self._pages[key]
        for (digest, _), (placement, rank, page) in known:
            key = digest, placement.width
            if key not in self._pages:  # else another sequence of that width begins alike
                self._pages[key] = (placement, rank, page)
                self._hashes[rank, page] = key
