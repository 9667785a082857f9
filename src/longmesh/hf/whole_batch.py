"""A batch as a scope is given it: whole, on every rank, checked before anything is cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longmesh.attention import masks
from longmesh.errors import LongmeshError
from longmesh.hf.batch_mask import document_lengths, visible

NAMES = ("token_type_ids", "mm_token_type_ids")
_OF_TOKENS = ("inputs_embeds", "attention_mask", "labels")
CUT = ("input_ids", "inputs_embeds", "labels", "attention_mask", "position_ids", *NAMES)
_INSTEAD = {
    "shift_labels": "; give labels, which are shifted before the cut",
    "cu_seq_lens_q": "; give cu_seqlens=, or position_ids that start again",
}
# Bounds of packed documents as flash attention wants them; a scope needs one of them, and the model none.
_BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
_NO_ID = -2  # of tokens that are given as embeddings: no token and no padding


@dataclass(frozen=True, eq=False)
class WholeBatch:
    """`ids`: (rows, tokens), without meaning where `embeds` are given instead. `positions`: those given, None if there
    are none. `in_order`: positions that start again where a document begins. `padding`: 1 for tokens, 0 for padding,
    None if there is none. `types`: names of what tells the kinds of tokens. `features`: of images and the like, by
    name."""

    ids: Tensor
    embeds: Tensor | None
    positions: Tensor | None
    in_order: Tensor
    padding: Tensor | None
    types: list[str]
    features: list[str]
    cu_seqlens: Tensor | Sequence[int] | None

    @staticmethod
    def of(batch: Mapping[str, Any], cu_seqlens: Tensor | Sequence[int] | None) -> WholeBatch:
        ids, embeds = batch.get("input_ids"), batch.get("inputs_embeds")
        if (ids is None) == (embeds is None):
            given = "neither" if ids is None else "both"
            raise LongmeshError(
                f"hf.context_parallel: the batch has {given} of input_ids (rows, tokens) and inputs_embeds (rows, "
                "tokens, features); give one of them"
            )
        if embeds is not None:
            ids = torch.full(embeds.shape[:2], _NO_ID, device=embeds.device)
        assert isinstance(ids, Tensor)
        _check_shapes(batch, ids)
        features = features_of(batch)
        if not features:
            _refuse_uncut(batch)
        counting = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        given = batch.get("position_ids")
        positions = given
        if given is not None and given.ndim < 3:
            positions = given.expand(ids.shape)
        padding = batch.get("attention_mask")
        # (3, rows, tokens) are of images as well: they tell no documents. Nor do positions beside a mask, of ones too.
        in_order = counting
        if positions is not None and positions.ndim < 3 and padding is None:
            in_order = positions
        return WholeBatch(
            ids=ids,
            embeds=embeds,
            positions=positions,
            in_order=in_order,
            padding=None if padding is None or bool(padding.all()) else padding,
            types=[name for name in NAMES if isinstance(batch.get(name), Tensor)],
            features=features,
            cu_seqlens=cu_seqlens,
        )

    @property
    def is_packed(self) -> bool:
        return self.cu_seqlens is not None or bool((self.in_order.diff(dim=1) != 1).any())

    @property
    def can_be_padded(self) -> bool:
        return (
            not self.features and self.ids.shape[1] > 0 and (self.padding is None or self.padding.ndim == 2)
        )

    def padded(self, batch: Mapping[str, Any], length: int) -> dict[str, Any]:
        """The batch with padding on the right, up to `length` tokens. Beside packed documents it is one more: with a
        mask of padding, positions that start again tell no documents."""
        missing = length - self.ids.shape[1]
        is_document = self.is_packed and batch.get("attention_mask") is None
        found = dict(batch)
        if not is_document:
            mask = torch.ones_like(self.ids) if self.padding is None else self.padding
            found["attention_mask"] = torch.nn.functional.pad(mask, (0, missing))
        for name in ("input_ids", "labels", *self.types):
            if isinstance(batch.get(name), Tensor):
                value = -100 if name == "labels" else 0
                found[name] = torch.nn.functional.pad(batch[name], (0, missing), value=value)
        if self.embeds is not None:
            found["inputs_embeds"] = torch.nn.functional.pad(self.embeds, (0, 0, 0, missing))
        if self.positions is not None:
            last = -1 if is_document else self.positions[..., -1:]
            later = last + torch.arange(1, missing + 1, device=self.ids.device)
            later = later.expand(*self.positions.shape[:-1], -1)
            found["position_ids"] = torch.cat([self.positions, later], -1)
        return found

    def visible(self, batch: Mapping[str, Any], mask: masks.Mask | None) -> masks.Mask | None:
        """What attention may see, None if everything."""
        seen = visible(batch, self.in_order, self.cu_seqlens)
        if mask is None or seen is None:
            return seen if mask is None else mask
        return seen & mask

    def documents(self, *, apart: bool) -> list[list[int]]:
        """The lengths of each row's documents; `apart`: padding is documents of its own."""
        return document_lengths(self.padding, self.in_order, self.cu_seqlens, apart=apart)


def scope_arguments(batch: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A collator's batch without bounds of documents, and the options of `context_parallel` that say the same."""
    rest = {name: value for name, value in batch.items() if name not in _BOUNDS}
    bounds = batch.get("cu_seq_lens_q")
    return rest, {} if bounds is None else {"cu_seqlens": bounds}


def features_of(batch: Mapping[str, Any]) -> list[str]:
    """What a batch gives a model to fuse into its embeddings: floating-point tensors that are not of tokens."""
    return [
        name
        for name, value in batch.items()
        if name not in _OF_TOKENS and isinstance(value, Tensor) and value.is_floating_point()
    ]


def _refuse_uncut(batch: Mapping[str, Any]) -> None:
    """What is not known to be of tokens would reach the model whole, beside a part of the tokens."""
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.ndim and name not in CUT:
            raise LongmeshError(
                f"hf.context_parallel: the batch has {name} of {tuple(value.shape)}, and it is not known how "
                f"to cut it{_INSTEAD.get(name, '; leave it out')}. Known are {', '.join(CUT)}"
            )


def _check_shapes(batch: Mapping[str, Any], ids: Tensor) -> None:
    if ids.ndim != 2:
        raise LongmeshError(f"hf.context_parallel: input_ids are {tuple(ids.shape)}; give (rows, tokens)")
    for name in ("labels", "attention_mask", "position_ids", *NAMES):
        value = batch.get(name)
        if not isinstance(value, Tensor) or (name == "attention_mask" and value.ndim != 2):
            continue
        wanted = tuple(ids.shape)
        is_like = tuple(value.shape[-2:]) == wanted or (
            name == "position_ids" and value.shape[-1] == wanted[1] and value.shape[:-1].numel() == 1
        )
        if not is_like:
            raise LongmeshError(
                f"hf.context_parallel: {name} are {tuple(value.shape)} for {wanted[0]} rows of {wanted[1]} tokens; "
                "give the whole batch, shaped alike"
            )
