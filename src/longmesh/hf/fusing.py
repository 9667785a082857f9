"""Images and sound beside the tokens: the sequence is cut where a model's language model begins.

    pixels --vision tower--> features --+
    ids    --embeddings----------------(fused)--> embeddings of all tokens --cut--> the language model, head, loss

A batch that has pixels goes to the model whole. What comes before the language model runs on every rank, with attention
of one process; each rank's loss depends on its own tokens, so gradients of ranks add up there, too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from longmesh.attention import masks
from longmesh.attention.scope.cut_mask import CutMask
from longmesh.errors import LongmeshError
from longmesh.hf.mask_functions import block_rule, mask_of
from longmesh.hf.open_batch import OpenBatch
from longmesh.hf.state import MaskRequest, PlainState, current, set_state


class FusingState(PlainState):
    """What comes before the language model runs on all tokens, inside a CutState."""

    def mask(self, request: MaskRequest) -> Any:
        assert self.batch is not None, "features are of a batch"
        if request.queries != self.batch.length:  # of images
            return request.by_sdpa()
        return request.stand_in(mask_of(request.function, self))

    def whole_mask(self, request: MaskRequest) -> Any:
        return self.mask(request)

    def block_mask(self, local: Tensor) -> masks.Mask:
        assert self.batch is not None, "features are of a batch"
        return block_rule(local, self.batch.types, self.batch)

    def positions(self) -> Tensor | None:
        return None  # a module that sees all tokens counts them right

    def whole_positions(self) -> Tensor | None:
        return None


def cut_at_decoder(model: Any, batch: OpenBatch) -> Callable[[], None]:
    """Let the model run whole up to its language model, which gets this rank's tokens. Returns what undoes it."""
    decoder = model.get_decoder()
    if decoder is model or decoder is model.base_model:
        raise LongmeshError(
            f"hf.context_parallel: the batch has {', '.join(batch.features)}, and {type(model).__name__} has no "
            "language model inside that gets embeddings of all tokens, where the sequence could be cut; fuse features "
            "yourself and give inputs_embeds"
        )
    batch.decoder = frozenset(decoder.modules())
    undo, left = ExitStack(), list[FusingState]()

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state = current()
        if not isinstance(state, FusingState):
            return None
        part = cut_arguments(module, args, kwargs, batch)
        left.append(state)
        set_state(state.outer)
        return (), part

    def leave(*args: Any) -> None:
        if left:
            set_state(left.pop())

    for handle in (
        decoder.register_forward_pre_hook(enter, with_kwargs=True),
        decoder.register_forward_hook(leave, always_call=True),
    ):
        undo.callback(handle.remove)
    return undo.close


def cut_arguments(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], batch: OpenBatch
) -> dict[str, Any]:
    """This rank's part of what a language model is called with. The same answer on every rank."""
    embeds, length = kwargs.get("inputs_embeds"), batch.length
    if args or not isinstance(embeds, Tensor) or embeds.shape[:2] != (batch.rows, length):
        raise LongmeshError(
            f"hf.context_parallel: {type(module).__name__} does not get inputs_embeds of all {length} tokens, so its "
            "sequence can't be cut there; fuse features yourself and give inputs_embeds"
        )
    shard = batch.cut.lead.shard
    part = dict(kwargs)
    shown, deep = part.pop("visual_pos_masks", None), part.pop("deepstack_visual_embeds", None)
    if shown is not None and deep is not None:
        mine = shard(_numbered(shown), 1)
        part["visual_pos_masks"] = shard(shown, 1)
        part["deepstack_visual_embeds"] = [features[mine[mine >= 0]] for features in deep]
    positions = part.pop("position_ids", None)
    for name, value in part.items():
        if name == "attention_mask":
            part[name] = _local_mask(value, batch)
        elif name in ("visual_pos_masks", "labels", "shift_labels", "num_items_in_batch"):
            continue
        elif isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == length:
            part[name] = shard(value, 1)
        elif isinstance(value, Tensor) and value.ndim:
            raise LongmeshError(
                f"hf.context_parallel: {type(module).__name__} is given {name} of {tuple(value.shape)}, which is not "
                "cut with the tokens, and it is not known how to cut it"
            )
    part["position_ids"] = batch.local_positions if positions is None else shard(positions, -1)
    return part


def _numbered(shown: Tensor) -> Tensor:
    """Where each shown token's features are, in the order of rows and tokens; -1 elsewhere."""
    numbers = shown.flatten().long().cumsum(0).view(shown.shape) - 1
    return torch.where(shown, numbers, -1)


def _local_mask(mask: Any, batch: OpenBatch) -> Any:
    """The scope has planned padding; what a mask means holds for any part."""
    if isinstance(mask, dict):
        return {kind: _local_mask(value, batch) for kind, value in mask.items()}
    if isinstance(mask, CutMask):
        return CutMask.of(mask.mask, mask.shape[0], batch.cut.num_tokens, mask.device)
    if mask is None or mask.ndim == 2:
        return None
    raise LongmeshError(
        f"hf.context_parallel: the model made a mask of {tuple(mask.shape)} for its language model by itself; give the "
        "mask to hf.context_parallel(mesh, batch, mask=...)"
    )
