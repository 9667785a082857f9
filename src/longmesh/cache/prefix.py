"""Finding pages that hold the beginning of a new sequence already, by hashes of their tokens. Pure.

A page's hash is made of its tokens and of the hash of the page before it, so that equal hashes are equal beginnings.
Only full pages of sequences that are alive are known; a page that is freed or written again is forgotten.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Listed

import numpy as np

from longmesh.cache.book import Book
from longmesh.cache.moving import Moved
from longmesh.cache.placement import Placement
from longmesh.cache.sequence import GONE, Sequence
from longmesh.errors import LongmeshError


def page_hashes(tokens: Listed[int], page: int) -> list[bytes]:
    """One for each full page of tokens; the same in every process."""
    found, before = [], b""
    numbers = np.asarray(tokens, dtype=np.int64)
    for start in range(0, len(numbers) // page * page, page):
        before = hashlib.blake2b(before + numbers[start : start + page].tobytes(), digest_size=16).digest()
        found.append(before)
    return found


class PrefixIndex:
    """The full pages of a book by the hash of what they and those before them hold."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._pages: dict[bytes, tuple[Placement, int, int]] = {}  # placement, rank and page
        self._hashes: dict[tuple[int, int], bytes] = {}
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
            slot = number % placement.width
            rank, page = placement.ranks[slot], sequence.tables[slot][number // placement.width]
            if (
                page != GONE
                and digest not in self._pages
                and (rank, page) not in self._hashes
                and not sequence.hidden
            ):
                self._pages[digest] = (placement, rank, page)
                self._hashes[rank, page] = digest

    def find(self, tokens: Listed[int]) -> Sequence | None:
        """A sequence in the pages that hold the beginning of `tokens`, as far as it is known; None if nothing is."""
        found: Sequence | None = None
        for number, digest in enumerate(page_hashes(tokens, self._book.page)):
            placement, rank, page = self._pages.get(digest, (None, 0, 0))
            if placement is None or (found is not None and found.placement != placement):
                break
            found = self._book.new_on(placement) if found is None else found
            self._book.ledgers[rank].share(page)
            found.tables[number % placement.width].append(page)
            found.length += placement.page
        return found

    def _forget(self, rank: int, page: int) -> None:
        digest = self._hashes.pop((rank, page), None)
        if digest is not None:
            del self._pages[digest]

    def _move(self, moved: Moved) -> None:
        known = [(self._hashes.pop(old), new) for old, new in moved.items() if old in self._hashes]
        for digest, (placement, rank, page) in known:
            self._pages[digest] = (placement, rank, page)
            self._hashes[rank, page] = digest
