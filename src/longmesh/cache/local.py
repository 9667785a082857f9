"""Attention over the keys that one rank holds: single tokens by products of matrices, else blocks by a kernel.

This rank's part of a step's attention: for every sequence it has keys of, the queries over those keys.

Shapes: T rows of the step, H query heads, G key heads, D head dim of keys, E of values.

Partial attention of a few queries over this rank's keys, on any device, by matrix products.

Shapes: n new tokens of a sequence, H query heads, G key heads, R = H / G, L = R * n rows, K local tokens, D head dim
of keys, E of values.

The queries of all heads that share a key head are rows of one matrix, so that each key is read once; keys are read in
their own dtype, and upcast tile by tile. Results are fp32 (fp64 for fp64), with lse -inf and output 0 for a query that
sees none of the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from longmesh.attention.kernel.merge import accumulate_dtype
from longmesh.cache.chunk import attend_chunk, positions_of
from longmesh.cache.plan import Keys, Shares
from longmesh.cache.store import PageRun, PageStore

_SCORES = 1 << 21  # of one tile
_UPCAST = 1 << 19  # elements of keys of one tile, where they are upcast

Visible = Callable[
    [int, int], Tensor | None
]  # (first local token, how many) -> (n, tokens), None if all are seen


def attend_pieces(
    q_nHD: Tensor, pieces: Sequence[PageRun], visible: Visible, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Output (n, H, E) and log-sum-exp (n, H). There is at least one piece."""
    n, H, D = q_nHD.shape
    G = pieces[0].k_GKD.shape[0]
    dtype = accumulate_dtype(q_nHD.dtype)
    q_GLD = (q_nHD.to(dtype) * scale).view(n, G, H // G, D).permute(1, 2, 0, 3).reshape(G, -1, D)
    found = [
        _attend_tile(q_GLD, k.to(dtype), v.to(dtype), visible(index, k.shape[1]), softcap)
        for piece in pieces
        for index, k, v in _tiles(piece, q_GLD.shape[1], dtype)
    ]
    out, lse = found[0] if len(found) == 1 else merge_stacked(*map(torch.stack, zip(*found, strict=True)))
    out = out.view(G, H // G, n, -1).permute(2, 0, 1, 3).reshape(n, H, -1)
    return out, lse.view(G, H // G, n).permute(2, 0, 1).reshape(n, H)


def _tiles(piece: PageRun, rows: int, dtype: torch.dtype) -> Iterable[tuple[int, Tensor, Tensor]]:
    """The piece in tiles that bound the memory of a product, each with its first local token."""
    first, k, v = piece
    G, K, D = k.shape
    most = max(1, _SCORES // (G * rows))
    if k.dtype != dtype:
        most = max(1, min(most, _UPCAST // (G * D)))
    for start in range(0, K, most):
        yield first + start, k[:, start : start + most], v[:, start : start + most]


def _attend_tile(
    q_GLD: Tensor, k_GKD: Tensor, v_GKE: Tensor, seen_nK: Tensor | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """(G, L, E) and (G, L)."""
    s = torch.bmm(q_GLD, k_GKD.mT)
    if softcap is not None:
        s = s.div_(softcap).tanh_().mul_(softcap)
    if seen_nK is None:
        highest = s.amax(2)
        p = s.sub_(highest.unsqueeze(-1)).exp_()
        total = p.sum(2)
        return torch.bmm(p, v_GKE).div_(total.unsqueeze(-1)), total.log_().add_(highest)
    G, L, K = s.shape
    s.view(G, L // len(seen_nK), len(seen_nK), K).masked_fill_(~seen_nK, -torch.inf)
    highest = s.amax(2)
    highest.masked_fill_(highest == -torch.inf, 0.0)
    p = s.sub_(highest.unsqueeze(-1)).exp_()
    total = p.sum(2)
    out = torch.bmm(p, v_GKE) / total.masked_fill(total == 0, 1.0).unsqueeze(-1)
    return out, total.log_().add_(highest)


def merge_stacked(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Partial results over disjoint keys, stacked in the first dim, as one. The same bits for the same input."""
    highest = lses.amax(0)
    highest = highest.masked_fill(highest == -torch.inf, 0.0)
    weights = (lses - highest).exp_()
    total = weights.sum(0)
    out = (outs * weights.unsqueeze(-1)).sum(0) / total.masked_fill(total == 0, 1.0).unsqueeze(-1)
    return out, total.log() + highest


_FEW = 16  # new tokens of a sequence up to which its pages are read where they lie


class ScoreChange(NamedTuple):
    """How scores are made. `scale` None is ``1 / sqrt(D)``."""

    scale: float | None = None
    softcap: float | None = None

    def scale_for(self, head_dim: int) -> float:
        return head_dim**-0.5 if self.scale is None else self.scale


class KeySource(Protocol):
    """Where keys and values come from."""

    def pieces(self, keys: Keys) -> list[PageRun]:
        """The local tokens of ``keys.spans``, in order."""
        ...


class Paged:
    """The pages of a layer."""

    def __init__(self, store: PageStore) -> None:
        self._store = store

    def pieces(self, keys: Keys) -> list[PageRun]:
        return self._store.pieces(keys.entry.sequence.runs(keys.slot), keys.spans)


class GivenKeys:
    """Keys and values that were made of a layer's pages: all local tokens of its sequences, one after another."""

    def __init__(self, k_GKD: Tensor, v_GKE: Tensor, starts: dict[int, int]) -> None:
        self._k, self._v, self._starts = k_GKD, v_GKE, starts  # starts: by the entry's first row

    def pieces(self, keys: Keys) -> list[PageRun]:
        at = self._starts[keys.entry.row]
        return [
            PageRun(start, self._k[:, at + start : at + stop], self._v[:, at + start : at + stop])
            for start, stop in keys.spans
        ]


def attend_locally(
    q_THD: Tensor, v_head_dim: int, source: KeySource, shares: Shares, rank: int, scores: ScoreChange
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


def joined(pieces: list[PageRun]) -> tuple[Tensor, Tensor]:
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
