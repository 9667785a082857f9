"""Lowering for a kernel that takes sequences of many lengths in one launch: which launches compute a list of blocks.

    blocks of a stage -> pieces with one of four windows -> sequences -> launches

A launch has one window for all its sequences, aligned at the bottom right corner of each:

    full            causal          left corner     band
    # # # #         # # # .         # # # #         # # . .       rows downwards, keys to the right
    # # # #         # # # #         . # # #         . # # .

A block whose edges end elsewhere is cut in such pieces. Rows of a launch lie back to back: where they do in the buffer
it is a view, else a copy. A launch on a GPU costs as much as ten million pairs, so blocks share one even where rows
that several of them use are copied more than once, up to a share of the buffer; beyond it they get another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from longmesh.attention.kernel.lower import as_tile, coalesce
from longmesh.attention.mask.block import UNBOUNDED, Block

EXTRA_SHARE = 0.15  # of the buffer's rows that a stage may copy again
_MOST_LAUNCHES = 4  # beyond these a copy is made where it is cheaper than a launch
_EXTRA_ROWS = 10_000  # rows whose copies, there and back, take as long as a launch

Runs = tuple[tuple[int, int], ...]
Window = tuple[int | None, int | None]


class Joint(NamedTuple):
    """Query runs and key runs that lie back to back, and the distances that the window shows; None: unbounded."""

    q: Runs
    k: Runs
    window: Window


class VarlenLaunch(NamedTuple):
    """One call: the rows of both buffers in order, where sequences begin, and the window of all of them."""

    q_rows: np.ndarray
    k_rows: np.ndarray
    q_starts: np.ndarray
    k_starts: np.ndarray
    window: Window

    @property
    def extra_rows(self) -> tuple[int, int]:
        """Query and key rows that occur again."""
        return len(self.q_rows) - len(np.unique(self.q_rows)), len(self.k_rows) - len(np.unique(self.k_rows))


def cut(block: Block) -> list[Joint]:
    """The pieces of one block: an exact disjoint cover of it, each with a window at its corner."""
    found: list[Joint] = []
    for q, k, rows, keys, lo, hi, _ in as_tile(block):
        if lo == -UNBOUNDED and hi == UNBOUNDED:
            found.append(_piece(q, rows, k, keys, None, None))
        elif hi != UNBOUNDED:
            ending = keys - hi  # rows up to the one that sees the last key
            left = None if lo == -UNBOUNDED else hi - lo
            found.append(_piece(q, ending, k, keys, left, 0))
            low = lo if lo == -UNBOUNDED else lo + k - q
            found += cut(Block(q + ending, q + rows, k, k + keys, low, UNBOUNDED))
        else:
            whole = -lo  # rows above this see every key
            if whole:
                found.append(_piece(q, whole, k, keys, None, None))
            square = rows - whole
            found.append(_piece(q + whole, square, k, square, 0, None))
            if keys > square:
                found.append(_piece(q + whole, square, k + square, keys - square, None, None))
    return found


def _piece(q: int, rows: int, k: int, keys: int, left: int | None, right: int | None) -> Joint:
    return Joint(((q, q + rows),), ((k, k + keys),), (left, right))


def _joined(pieces: list[Joint]) -> list[Joint]:
    """Pieces without a window: keys of the same queries in one sequence, then queries of the same keys."""
    by_queries: dict[Runs, list[tuple[int, int]]] = {}
    for piece in pieces:
        by_queries.setdefault(piece.q, []).extend(piece.k)
    by_keys: dict[Runs, list[tuple[int, int]]] = {}
    for q, keys in by_queries.items():
        by_keys.setdefault(tuple(sorted(keys)), []).extend(q)
    return [Joint(tuple(sorted(q)), k, (None, None)) for k, q in by_keys.items()]


@lru_cache(maxsize=512)
def launches(blocks: tuple[Block, ...], query_rows: int, key_rows: int) -> tuple[VarlenLaunch, ...]:
    """The launches that compute `blocks`, which lie in buffers of `query_rows` and `key_rows` rows."""
    by_window: dict[Window, list[Joint]] = {}
    for block in coalesce(blocks):
        for piece in cut(block):
            by_window.setdefault(piece.window, []).append(piece)
    if (None, None) in by_window:
        by_window[None, None] = _joined(by_window[None, None])
    open_launches: list[_Open] = []
    left = [int(EXTRA_SHARE * query_rows), int(EXTRA_SHARE * key_rows)]  # rows that may still be copied again
    for window, pieces in by_window.items():
        own: list[_Open] = []
        for piece in sorted(pieces):
            extra = [launch.extra(piece) for launch in own]
            fits = [i for i, (q, k) in enumerate(extra) if q <= left[0] and k <= left[1]]
            if not fits and len(open_launches) >= _MOST_LAUNCHES:
                fits = [i for i, (q, k) in enumerate(extra) if q + k < _EXTRA_ROWS]
            if fits:
                best = min(fits, key=lambda i: (sum(extra[i]), i))
                left = [have - used for have, used in zip(left, extra[best], strict=True)]
                own[best].add(piece)
            else:
                own.append(_Open(query_rows, key_rows, window))
                open_launches.append(own[-1])
                own[-1].add(piece)
    return tuple(launch.close() for launch in open_launches)


class _Open:
    """A launch to which sequences are being added."""

    def __init__(self, query_rows: int, key_rows: int, window: Window) -> None:
        self._taken = np.zeros(query_rows, dtype=bool), np.zeros(key_rows, dtype=bool)
        self._window = window
        self._sequences: list[Joint] = []

    def extra(self, piece: Joint) -> tuple[int, int]:
        """Query and key rows of the piece that the launch has already."""
        q, k = (
            sum(int(taken[a:b].sum()) for a, b in runs)
            for taken, runs in zip(self._taken, (piece.q, piece.k), strict=True)
        )
        return q, k

    def add(self, piece: Joint) -> None:
        for taken, runs in zip(self._taken, (piece.q, piece.k), strict=True):
            for a, b in runs:
                taken[a:b] = True
        self._sequences.append(piece)

    def close(self) -> VarlenLaunch:
        q, k = [_rows(piece.q) for piece in self._sequences], [_rows(piece.k) for piece in self._sequences]
        return VarlenLaunch(np.concatenate(q), np.concatenate(k), _starts(q), _starts(k), self._window)


def _rows(runs: Runs) -> np.ndarray:
    return np.concatenate([np.arange(a, b) for a, b in runs])


def _starts(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.cumsum([0, *(len(part) for part in parts)]).astype(np.int32)
