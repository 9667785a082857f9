"""transformers' mask functions as masks of ours.

transformers builds a model's mask as nested functions of (batch, head, query, key) indices, over indices of the
tokens that the model sees: over a cut sequence this rank's. Each is known here by its name and by what it captured, and
becomes a mask in global positions. What is not known is refused.

    and_masks(sliding_window_overlay(9), causal_mask_function)   ->   sliding_window(8, ...) & causal()
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch

from longmesh.attention import masks
from longmesh.attention.mask.band import Band
from longmesh.errors import LongmeshError
from longmesh.hf.batch_mask import run_lengths
from longmesh.hf.open_batch import OpenBatch
from longmesh.hf.private import read_mask_function, remaps_packed
from longmesh.hf.token_blocks import NOTHING, block_mask


def mask_of(function: Callable[..., Any], batch: OpenBatch | None) -> masks.Mask | None:
    """The mask that a mask function of transformers stands for, None if it hides nothing that the scope does not."""
    name, captured = read_mask_function(function)
    match name:
        case "causal_mask_function":
            return masks.causal()
        case "bidirectional_mask_function":
            return masks.full()
        case "and_masks":
            parts = [mask_of(part, batch) for part in captured["mask_functions"]]
            known = [part for part in parts if part is not None]
            return functools.reduce(operator.and_, known) if known else None
        case "or_masks":
            parts = [mask_of(part, batch) for part in captured["mask_functions"]]
            known = [part for part in parts if part is not None and part != NOTHING]
            return functools.reduce(operator.or_, known) if len(known) and None not in parts else None
        case "sliding_window_overlay":
            return Band(lo=1 - captured["sliding_window"])  # a window of 0 hides all
        case "sliding_window_bidirectional_overlay":
            return masks.sliding_window(captured["sliding_window"], captured["sliding_window"])
        case "chunked_overlay":
            return _chunks(captured["chunk_size"], batch)
        case "blockwise_overlay":
            return block_mask(captured["block_sequence_ids"], batch)
        case "packed_sequence_mask_function":
            return None  # found in this rank's positions; the scope found the documents in all of them
        case "remap_positions_for_packed_sequence":
            return mask_of(captured["mask_function"], batch)  # in a document, positions grow as indices do
    raise LongmeshError(
        f"the model adds a mask function of its own ({name}), which sees this rank's indices; over a cut sequence give "
        "the mask to hf.context_parallel(mesh, batch, mask=...)"
    )


def _chunks(size: int, batch: OpenBatch | None) -> masks.Mask:
    """Chunks of a row begin at its first token that is not padding. Those of packed documents are of positions, where
    transformers has them so: what this rank's function says is no answer, since its part may be of one document."""
    by_position = batch is not None and batch.is_packed and not batch.has_mask and remaps_packed()
    if batch is None or not (by_position or any(batch.left_padding)):
        return masks.chunked(size, within=masks.full())
    counted = batch.in_order
    if not by_position:
        counted = torch.arange(batch.length) - torch.tensor(batch.left_padding)[:, None]
    begins = (counted // size).diff(dim=1) != 0
    rows = [run_lengths(row.tolist()) for row in begins]
    return masks.documents(rows[0] if len(rows) == 1 else rows, within=masks.full())
