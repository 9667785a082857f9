"""Masks by the type of a token: tokens of one image see each other, or the tokens of a prompt do.

A model numbers such blocks from the token types that it sees, over a cut sequence this rank's. Which rule it follows is
read from its numbers, and the rule is then applied to the types of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from longmesh.attention import masks
from longmesh.attention.mask.band import Band
from longmesh.errors import LongmeshError
from longmesh.hf.everywhere import true_everywhere
from longmesh.hf.open_batch import OpenBatch, current_inspection, is_fusing

NOTHING = Band(lo=1, hi=0)  # no token sees any
NAMES = ("token_type_ids", "mm_token_type_ids")


def image_blocks(types: Tensor) -> Tensor:
    """Runs of type 1, numbered from 0; -1 elsewhere."""
    image = types == 1
    before = torch.nn.functional.pad(image, (1, 0), value=False)[:, :-1]
    return torch.where(image, (image & ~before).long().cumsum(1) - 1, -1)


def prompt_block(types: Tensor) -> Tensor:
    """All tokens of type 0 are one block."""
    return torch.where(types == 0, 0, -1)


RULES: tuple[Callable[[Tensor], Tensor], ...] = (image_blocks, prompt_block)


def block_mask(local: Tensor, batch: OpenBatch | None) -> masks.Mask:
    """Who sees whom inside blocks, from the numbers that a model gave this rank's tokens. Collective."""
    if current_inspection() is not None:
        return masks.full()
    types = None if batch is None else batch.types
    if batch is not None and types is None and _has_none(local, batch):
        return NOTHING
    if batch is None or types is None:
        raise LongmeshError(
            "the model masks by blocks of tokens: give token_type_ids or mm_token_type_ids in the batch of "
            "hf.context_parallel, which cuts them"
        )
    part = types if is_fusing() else batch.cut.lead.shard(types, 1)
    fits = torch.tensor([bool((rule(part) == local).all()) for rule in RULES], device=local.device)
    fitting = true_everywhere(fits, batch.cut.mesh)  # a rank may have no tokens to tell rules apart
    if not bool(fitting.any()):
        raise LongmeshError(
            "the model masks by blocks of tokens in a way that is not known; give the mask to "
            "hf.context_parallel(mesh, batch, mask=...)"
        )
    return batch.in_blocks(RULES[int(fitting.long().argmax())])


def _has_none(local: Tensor, batch: OpenBatch) -> bool:
    """Whether no token of any rank is in a block."""
    return bool(true_everywhere((local < 0).all().view(1), batch.cut.mesh).all())
