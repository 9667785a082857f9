"""transformers' mask functions as masks of ours.

transformers builds a model's mask as nested functions of (batch, head, query, key) indices, over indices of the
tokens that the model sees: over a cut sequence this rank's. Each is known here by its name and by what it captured
(`KNOWN`), and becomes a mask in global positions. What is not known is refused.

    and_masks(sliding_window_overlay(9), causal_mask_function)   ->   sliding_window(8, ...) & causal()

Masks by the type of a token (tokens of one image see each other, or the tokens of a prompt do) are numbers of blocks,
which a model makes from the types that it sees. Which rule it follows is read from its numbers, and the rule is then
applied to the types of the whole batch.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longmesh.attention import masks
from longmesh.attention.mask.band import Band
from longmesh.errors import LongmeshError
from longmesh.hf.batch_mask import run_lengths
from longmesh.hf.open_batch import OpenBatch
from longmesh.hf.private import read_mask_function, remaps_packed
from longmesh.hf.ranks_agree import true_everywhere

if TYPE_CHECKING:
    from longmesh.hf.state import OutsideState

NOTHING = Band(lo=1, hi=0)  # no token sees any
Found = masks.Mask | None  # None: it hides nothing that the scope does not


def mask_of(function: Callable[..., Any], state: OutsideState) -> masks.Mask:
    """The mask that a mask function of transformers stands for."""
    return _found(function, state) or masks.full()


def _found(function: Callable[..., Any], state: OutsideState) -> Found:
    name, captured = read_mask_function(function)
    if name not in KNOWN:
        raise LongmeshError(
            f"the model adds a mask function of its own ({name}), which sees this rank's indices; over a cut sequence "
            "give the mask to hf.context_parallel(mesh, batch, mask=...)"
        )
    return KNOWN[name](captured, state)


def _all_of(captured: dict[str, Any], state: OutsideState) -> Found:
    known = [
        mask for mask in (_found(part, state) for part in captured["mask_functions"]) if mask is not None
    ]
    return functools.reduce(operator.and_, known) if known else None


def _any_of(captured: dict[str, Any], state: OutsideState) -> Found:
    parts = [_found(part, state) for part in captured["mask_functions"]]
    known = [part for part in parts if part is not None and part != NOTHING]
    return functools.reduce(operator.or_, known) if len(known) and None not in parts else None


def _chunks(captured: dict[str, Any], state: OutsideState) -> masks.Mask:
    """Chunks of a row begin at its first token that is not padding. Those of packed documents are of positions, where
    transformers has them so: what this rank's function says is no answer, since its part may be of one document."""
    size, batch = captured["chunk_size"], state.batch
    by_position = batch is not None and batch.is_packed and not batch.has_mask and remaps_packed()
    if batch is None or not (by_position or any(batch.left_padding)):
        return masks.chunked(size, within=masks.full())
    counted = batch.in_order
    if not by_position:
        counted = torch.arange(batch.length) - torch.tensor(batch.left_padding)[:, None]
    begins = (counted // size).diff(dim=1) != 0
    rows = [run_lengths(row.tolist()) for row in begins]
    return masks.documents(rows[0] if len(rows) == 1 else rows, within=masks.full())


# By the name of transformers' function: what it means, from what it captured.
KNOWN: dict[str, Callable[[dict[str, Any], Any], Found]] = {
    "causal_mask_function": lambda captured, state: masks.causal(),
    "bidirectional_mask_function": lambda captured, state: masks.full(),
    "and_masks": _all_of,
    "or_masks": _any_of,
    # A window of 0 hides all.
    "sliding_window_overlay": lambda captured, state: Band(lo=1 - captured["sliding_window"]),
    "sliding_window_bidirectional_overlay": lambda captured, state: masks.sliding_window(
        captured["sliding_window"], captured["sliding_window"]
    ),
    "chunked_overlay": _chunks,
    "blockwise_overlay": lambda captured, state: state.block_mask(captured["block_sequence_ids"]),
    # Found in this rank's positions; the scope found the documents in all of them.
    "packed_sequence_mask_function": lambda captured, state: None,
    # In a document, positions grow as indices do.
    "remap_positions_for_packed_sequence": lambda captured, state: _found(captured["mask_function"], state),
}


def image_blocks(types: Tensor) -> Tensor:
    """Runs of type 1, numbered from 0; -1 elsewhere."""
    image = types == 1
    before = torch.nn.functional.pad(image, (1, 0), value=False)[:, :-1]
    return torch.where(image, (image & ~before).long().cumsum(1) - 1, -1)


def prompt_block(types: Tensor) -> Tensor:
    """All tokens of type 0 are one block."""
    return torch.where(types == 0, 0, -1)


BLOCK_RULES: tuple[Callable[[Tensor], Tensor], ...] = (image_blocks, prompt_block)


def block_rule(local: Tensor, part: Tensor | None, batch: OpenBatch) -> masks.Mask:
    """Who sees whom inside blocks, from the numbers that a model gave the tokens that it sees; `part`: their types.
    Collective."""
    if part is None and _has_none(local, batch):
        return NOTHING
    if part is None:
        raise LongmeshError(
            "the model masks by blocks of tokens: give token_type_ids or mm_token_type_ids in the batch of "
            "hf.context_parallel, which cuts them"
        )
    fits = torch.tensor([bool((rule(part) == local).all()) for rule in BLOCK_RULES], device=local.device)
    fitting = true_everywhere(fits, batch.cut.mesh)  # a rank may have no tokens to tell rules apart
    if not bool(fitting.any()):
        raise LongmeshError(
            "the model masks by blocks of tokens in a way that is not known; give the mask to "
            "hf.context_parallel(mesh, batch, mask=...)"
        )
    return batch.in_blocks(BLOCK_RULES[int(fitting.long().argmax())])


def _has_none(local: Tensor, batch: OpenBatch) -> bool:
    """Whether no token of any rank is in a block."""
    return bool(true_everywhere((local < 0).all().view(1), batch.cut.mesh).all())


def dense(mask: masks.Mask, batch: OpenBatch) -> Tensor:
    """The whole mask as a tensor to be added to scores: (rows, 1, tokens, tokens)."""
    seen = batch.cut.engine_with(mask).plan.mask
    length, device = batch.length, batch.tokens.device
    at = torch.arange(length, device=device)
    rows = [torch.tensor(row, device=device) for row in range(batch.rows)]
    shown = torch.stack([seen.visible(row, torch.zeros_like(row), at[:, None], at) for row in rows])
    return torch.zeros(shown.shape, device=device).masked_fill(~shown, torch.finfo(torch.float32).min)[
        :, None
    ]
