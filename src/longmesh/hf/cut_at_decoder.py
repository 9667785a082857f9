"""Images and sound beside the tokens: the sequence is cut where a model's language model begins.

    pixels --vision tower--> features --+
    ids    --embeddings----------------(fused)--> embeddings of all tokens --cut--> the language model, head, loss

A batch that has pixels goes to the model whole. What comes before the language model runs on every rank, with attention
of one process; each rank's loss depends on its own tokens, so gradients of ranks add up there, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from longmesh.attention.scope.cut_mask import CutMask
from longmesh.errors import LongmeshError
from longmesh.hf.open_batch import OpenBatch, current_inspection, set_fusing

_OF_TOKENS = ("inputs_embeds", "attention_mask", "labels")


def features_of(batch: Mapping[str, Any]) -> list[str]:
    """What a batch gives a model to fuse into its embeddings: floating-point tensors that are not of tokens."""
    return [
        name
        for name, value in batch.items()
        if name not in _OF_TOKENS and isinstance(value, Tensor) and value.is_floating_point()
    ]


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
    undo = ExitStack()

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if current_inspection() is not None:
            return None
        set_fusing(False)
        return (), cut_arguments(module, args, kwargs, batch)

    def leave(*args: Any) -> None:
        set_fusing(current_inspection() is None)

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
