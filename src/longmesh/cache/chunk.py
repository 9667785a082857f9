"""Partial attention of many queries of a sequence over this rank's pages: a chunk of a prompt, by the block kernels.

Shapes: n new tokens, H query heads, G key heads, K local tokens, D head dim of keys, E of values.

Local tokens that follow each other in the sequence, too, have a diagonal band; pages of a sequence over several ranks
have one each, and rectangles below it that are as large as can be. Where blocks would be tiny, one masked block asks
for each pair.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from longmesh.attention.kernel.base import Coordinates, KernelWork, Score
from longmesh.attention.kernel.choose import choose, need_of
from longmesh.attention.mask.block import UNBOUNDED, Block
from longmesh.cache.plan import Keys

_SMALLEST = 32  # tokens of a block, on average


def attend_chunk(
    q_nHD: Tensor, k_GKD: Tensor, v_GKE: Tensor, keys: Keys, window: int | None, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output (n, H, E) and log-sum-exp (n, H) over the local tokens of ``keys.spans``, which k and v hold in order."""
    runs = runs_of(keys)
    score = Score(scale=scale, score_mod=None if softcap is None else _capped(softcap))
    where = Coordinates()
    if len(runs) > 1 and k_GKD.shape[1] < _SMALLEST * len(runs):
        blocks = [Block(0, q_nHD.shape[0], 0, k_GKD.shape[1], elementwise=True)]
        score = Score(scale=scale, score_mod=score.score_mod, mask_mod=_up_to_query(window))
        q_at, k_at = (torch.from_numpy(p).to(q_nHD.device) for p in positions_of(keys))
        where = Coordinates(q_at, k_at)
    else:
        blocks = blocks_of(runs, keys.entry.start, q_nHD.shape[0], window)
    q, k, v = q_nHD.transpose(0, 1)[None], k_GKD[None], v_GKE[None]
    kernel = choose(need_of(q, v, score, blocks, needs_grad=False)).kernel
    state = kernel.forward(KernelWork(q, k, v, blocks, score, where))
    return state.out_BHSD[0].transpose(0, 1), state.lse_BHS[0].transpose(0, 1)


class _KeyRun(NamedTuple):
    """Local tokens whose positions follow each other, too: `row` among the local tokens, `first` the position."""

    row: int
    first: int
    num_tokens: int


def runs_of(keys: Keys) -> list[_KeyRun]:
    """The local tokens of ``keys.spans``: pages, or all of a span where one rank has all tokens."""
    _, slot, spans = keys
    placement = keys.entry.sequence.placement
    page, alone = placement.page, placement.width == 1
    runs: list[_KeyRun] = []
    row = 0
    for start, stop in spans:
        while start < stop:
            end = stop if alone else min(stop, (start // page + 1) * page)
            runs.append(_KeyRun(row, placement.position(slot, start), end - start))
            row, start = row + end - start, end
    return runs


def blocks_of(runs: list[_KeyRun], start: int, num_queries: int, window: int | None) -> list[Block]:
    """An exact disjoint cover of what queries from position `start` on see of the local tokens, in rows of both."""
    if window is not None:
        return [_band(run, start, num_queries, window) for run in runs]
    past = sum(run.first + run.num_tokens <= start for run in runs)
    num_past = sum(run.num_tokens for run in runs[:past])
    blocks = [Block(0, num_queries, 0, num_past)] if past else []
    return blocks + (_triangle(runs[past:], start, num_queries) if past < len(runs) else [])


def _band(run: _KeyRun, start: int, num_queries: int, window: int) -> Block:
    shift = start + run.row - run.first  # key row - query row of one position
    last = min(num_queries, run.first + run.num_tokens - 1 + window - start)
    return Block(
        max(0, run.first - start), last, run.row, run.row + run.num_tokens, shift - window + 1, shift
    )


def _triangle(runs: list[_KeyRun], start: int, stop: int) -> list[Block]:
    """What queries up to row `stop` see of these, from the first run's first token on.

    Queries from the middle run on see all of the first half: halves make few blocks, and large ones, for kernels.
    """
    row, first, count = runs[0]
    q_start = max(0, first - start)
    if len(runs) == 1:
        q_stop, shift = first + count - start, start + row - first
        diagonal = Block(q_start, min(stop, q_stop), row, row + count, -UNBOUNDED, shift)
        return [diagonal, Block(q_stop, stop, row, row + count)] if q_stop < stop else [diagonal]
    half = len(runs) // 2
    middle = runs[half]
    q_middle = middle.first - start
    rectangle = Block(q_middle, stop, row, middle.row)
    return [*_triangle(runs[:half], start, q_middle), rectangle, *_triangle(runs[half:], start, stop)]


def positions_of(keys: Keys) -> tuple[np.ndarray, np.ndarray]:
    """Of the entry's queries and of the local tokens."""
    entry, slot, spans = keys
    placement = entry.sequence.placement
    index = np.concatenate([np.arange(start, stop) for start, stop in spans])
    number, offset = np.divmod(index, placement.page)
    return np.arange(entry.start, entry.stop), (number * placement.width + slot) * placement.page + offset


def _up_to_query(window: int | None) -> Callable[..., Tensor]:
    def seen(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        before = kv_idx <= q_idx
        return before if window is None else before & (kv_idx > q_idx - window)

    return seen


def _capped(limit: float) -> Callable[..., Tensor]:
    return lambda score, b, h, q_idx, kv_idx: limit * torch.tanh(score / limit)
