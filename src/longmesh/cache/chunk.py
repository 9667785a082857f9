"""Partial attention of many queries of a sequence over this rank's pages: a chunk of a prompt, by the block kernels.

Shapes: n new tokens, H query heads, G key heads, K local tokens, D head dim of keys, E of values.

Local tokens that follow each other in the sequence too are one block with a diagonal band; pages of a sequence over
several ranks are one block each. Where blocks would be tiny, one masked block asks for each pair.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from longmesh.attention.kernel import Coordinates, Score, Work, choose, need_of
from longmesh.attention.mask.block import UNBOUNDED, Block
from longmesh.cache.plan import Keys

_SMALLEST = 32  # tokens of a block, on average


def attend_chunk(
    q_nHD: Tensor, k_GKD: Tensor, v_GKE: Tensor, keys: Keys, window: int | None, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output (n, H, E) and log-sum-exp (n, H) over the local tokens of ``keys.spans``, which k and v hold in order."""
    blocks = blocks_of(keys, window)
    score = Score(scale=scale, score_mod=None if softcap is None else _capped(softcap))
    where = Coordinates()
    if len(blocks) > 1 and k_GKD.shape[1] < _SMALLEST * len(blocks):
        blocks = [Block(0, q_nHD.shape[0], 0, k_GKD.shape[1], elementwise=True)]
        score = Score(scale=scale, score_mod=score.score_mod, mask_mod=_up_to_query(window))
        q_at, k_at = (torch.from_numpy(p).to(q_nHD.device) for p in positions_of(keys))
        where = Coordinates(q_at, k_at)
    q, k, v = q_nHD.transpose(0, 1)[None], k_GKD[None], v_GKE[None]
    kernel = choose(need_of(q, v, score, blocks, needs_grad=False)).kernel
    state = kernel.forward(Work(q, k, v, blocks, score, where))
    return state.out_BHSD[0].transpose(0, 1), state.lse_BHS[0].transpose(0, 1)


def blocks_of(keys: Keys, window: int | None) -> list[Block]:
    """An exact disjoint cover of what the entry's queries see of the local tokens, in rows of both."""
    entry, slot, spans = keys
    placement, n = entry.sequence.placement, entry.num_tokens
    page, alone = placement.page, placement.width == 1
    blocks: list[Block] = []
    row = 0
    for start, stop in spans:
        while start < stop:
            end = stop if alone else min(stop, (start // page + 1) * page)
            first = placement.position(slot, start)
            count = end - start
            if (
                first + count <= entry.start and window is None
            ):  # seen by all queries, and so is all up to them
                end = min(stop, max(end, placement.local(slot, entry.start)))
                count = end - start
                blocks.append(Block(0, n, row, row + count))
            else:
                shift = entry.start + row - first  # key row - query row of one position
                lo = -UNBOUNDED if window is None else shift - window + 1
                last = n if window is None else min(n, first + count - 1 + window - entry.start)
                blocks.append(Block(max(0, first - entry.start), last, row, row + count, lo, shift))
            row, start = row + count, end
    return blocks


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
