"""Attention of a model's new tokens over a `ShardedCache`, and its masks: what the interface calls for such keys.

A model's mask is made before its layers run, from the cache's lengths; they know the cache, so that the mask can be
a description instead of a tensor of all pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longmesh._torch import no_subclass_functions
from longmesh.attention.mask.block import UNBOUNDED
from longmesh.attention.scope.cut_mask import MaskStandIn
from longmesh.cache.check import forward_only
from longmesh.errors import LongmeshError
from longmesh.hf.cached_batch import CachedBatch
from longmesh.hf.cached_keys import CachedKeys
from longmesh.hf.mask_functions import mask_of
from longmesh.hf.state import AttentionRequest, MaskRequest, OutsideState


class CachedLength(int):
    """How many keys a mask is over, those of a cache."""

    batch: CachedBatch

    @property
    def state(self) -> CachedState:
        """What answers masks over these keys."""
        return CachedState()

    @staticmethod
    def of(length: int, batch: CachedBatch) -> CachedLength:
        found = CachedLength(length)
        found.batch = batch
        return found


class CachedMask(MaskStandIn):
    """Stands for a causal mask over a cache, shaped (rows, 1, new tokens, all tokens). `window`: None for all keys."""

    REMEDY = "over a sharded cache there is no such tensor: use transformers' DynamicCache with this model"
    window: int | None

    @staticmethod
    def of(window: int | None, shape: tuple[int, int, int], device: torch.device | str) -> CachedMask:
        rows, new, length = shape
        found = CachedMask.shaped((rows, 1, new, length), device)
        found.window = window
        return found


class CachedState(OutsideState):
    """Answers for keys of a `ShardedCache`, in a scope or outside. Collective: every rank."""

    def attend(self, request: AttentionRequest) -> tuple[Tensor, None]:
        request.refuse_unknown()
        return attend_cached(request)

    def mask(self, request: MaskRequest) -> CachedMask:
        return cached_mask(self, request)


def cached_mask(state: CachedState, request: MaskRequest) -> CachedMask:
    """The mask of a model whose cache is sharded."""
    length = request.keys
    assert isinstance(length, CachedLength), "a cache counts its keys so"
    batch = length.batch
    if batch.step is None or not batch.step.is_cut or batch.updated:
        batch.see_mask(request.padding, request.queries)
    mask = mask_of(request.function, state)
    lo, hi = mask.band() or (None, None)
    if hi != 0 or lo is None:
        raise LongmeshError(
            f"hf.ShardedCache: the model's mask ({mask}) is neither causal nor a causal sliding window; use "
            "transformers' DynamicCache with this model"
        )
    window = None if lo == -UNBOUNDED else 1 - lo
    return CachedMask.of(window, (request.rows, request.queries, int(length)), request.device)


def attend_cached(request: AttentionRequest) -> tuple[Tensor, None]:
    """transformers' attention function for keys of a `ShardedCache`. Collective: every rank."""
    key, value, mask, name = request.key, request.value, request.mask, type(request.module).__name__
    assert isinstance(key, CachedKeys), "they carry this state"
    link = key.link
    step = link.batch.step
    if mask is not None and not isinstance(mask, CachedMask):
        raise LongmeshError(
            f"{name} was given a mask tensor, which a sharded cache can't use; give padding as a 2-D attention_mask"
        )
    if (
        request.dropout
        or not request.causal
        or not isinstance(value, CachedKeys)
        or value.link.layer != link.layer
    ):
        why = (
            "dropout: call model.eval()"
            if request.dropout
            else "attention that is not causal, or values of another layer"
        )
        raise LongmeshError(f"{name} asks of a sharded cache {why}")
    assert step is not None, "attention runs inside a step"
    link.batch.meet(link.layer, request.module)
    window = mask.window if mask is not None else request.window
    source, width = None, None
    if key.is_real or value.is_real:
        k, v = (t if t.is_real else link.real(t.is_values) for t in (key, value))
        with no_subclass_functions():
            k, v = k.as_subclass(Tensor), v.as_subclass(Tensor)
        if k.ndim != 4 or k.shape[0] != 1 or k.shape[-2] != link.num_tokens or v.shape[:3] != k.shape[:3]:
            raise LongmeshError(
                f"{name} made keys {tuple(k.shape)} and values {tuple(v.shape)} of {link.num_tokens} cached tokens; "
                "use transformers' DynamicCache with this model"
            )
        source, width = link.given(k, v), v.shape[-1]
    out = step.attend_written(
        link.layer,
        link.batch.pack(request.query),
        window=window,
        sinks=request.sinks,
        softcap=request.softcap,
        scale=request.scaling,
        source=source,
        v_head_dim=width,
    )
    return forward_only(link.batch.unpack(out, request.query), request.query), None
