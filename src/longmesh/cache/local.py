"""This rank's part of a step's attention: for every sequence it has keys of, the queries over those keys.

Shapes: T rows of the step, H query heads, G key heads, D head dim of keys, E of values.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from longmesh.attention.kernel.merge import accumulate_dtype
from longmesh.cache.chunk import attend_chunk, positions_of
from longmesh.cache.decode import attend_pieces
from longmesh.cache.plan import Keys, Shares
from longmesh.cache.store import PageStore, Piece

_FEW = 16  # new tokens of a sequence up to which its pages are read where they lie


class Scores(NamedTuple):
    """How scores are made. `scale` None is ``1 / sqrt(D)``."""

    scale: float | None = None
    softcap: float | None = None

    def scale_for(self, head_dim: int) -> float:
        return head_dim**-0.5 if self.scale is None else self.scale


class Source(Protocol):
    """Where keys and values come from."""

    def pieces(self, keys: Keys) -> list[Piece]:
        """The local tokens of ``keys.spans``, in order."""
        ...


class Paged:
    """The pages of a layer."""

    def __init__(self, store: PageStore) -> None:
        self._store = store

    def pieces(self, keys: Keys) -> list[Piece]:
        return self._store.pieces(keys.entry.sequence.runs(keys.slot), keys.spans)


class Given:
    """Keys and values that were made of a layer's pages: all local tokens of its sequences, one after another."""

    def __init__(self, k_GKD: Tensor, v_GKE: Tensor, starts: dict[int, int]) -> None:
        self._k, self._v, self._starts = k_GKD, v_GKE, starts  # starts: by the entry's first row

    def pieces(self, keys: Keys) -> list[Piece]:
        at = self._starts[keys.entry.row]
        return [
            Piece(start, self._k[:, at + start : at + stop], self._v[:, at + start : at + stop])
            for start, stop in keys.spans
        ]


def attend_locally(
    q_THD: Tensor, v_head_dim: int, source: Source, shares: Shares, rank: int, scores: Scores
) -> Tensor:
    """(rows, H, E + 1): output and log-sum-exp of the rows that this rank has keys for."""
    _, H, D = q_THD.shape
    found = torch.empty(
        (shares.num_rows[rank], H, v_head_dim + 1), dtype=accumulate_dtype(q_THD.dtype), device=q_THD.device
    )
    scale, at = scores.scale_for(D), 0
    for keys in shares.keys(rank):
        entry = keys.entry
        q_nHD = q_THD[entry.row : entry.row + entry.num_tokens]
        pieces = source.pieces(keys)
        if entry.num_tokens <= _FEW:
            visible = _Visible(keys, shares.window, q_THD.device)
            out, lse = attend_pieces(q_nHD, pieces, visible, scale, scores.softcap)
        else:
            k, v = joined(pieces)
            out, lse = attend_chunk(q_nHD, k, v, keys, shares.window, scale, scores.softcap)
        found[at : at + entry.num_tokens, :, :-1] = out
        found[at : at + entry.num_tokens, :, -1] = lse
        at += entry.num_tokens
    return found


def joined(pieces: list[Piece]) -> tuple[Tensor, Tensor]:
    """(G, K, D) and (G, K, E): the pieces one after another; no copy of a single one."""
    if len(pieces) == 1:
        return pieces[0].k_GKD, pieces[0].v_GKE
    return torch.cat([piece.k_GKD for piece in pieces], 1), torch.cat([piece.v_GKE for piece in pieces], 1)


class _Visible:
    """Which local tokens the queries of an entry see; None where all see all."""

    def __init__(self, keys: Keys, window: int | None, device: torch.device) -> None:
        self._keys, self._window, self._device = keys, window, device

    def __call__(self, index: int, count: int) -> Tensor | None:
        entry, slot, _ = self._keys
        if entry.num_tokens == 1:
            return None
        placement = entry.sequence.placement
        last = placement.position(slot, index + count - 1)
        first = placement.position(slot, index)
        if last <= entry.start and (self._window is None or first > entry.stop - 1 - self._window):
            return None
        q, k = positions_of(Keys(entry, slot, ((index, index + count),)))
        seen = k[None] <= q[:, None]
        if self._window is not None:
            seen &= k[None] > q[:, None] - self._window
        return torch.from_numpy(np.ascontiguousarray(seen)).to(self._device)
