"""Filling a `ShardedCache` with a prompt: each rank runs the model on the tokens whose keys it holds.

    tokens of a chunk   0 1 2 3 4 5 6 7        page 2, 2 ranks
    rank 0 runs         0 1     4 5            positions 0 1 4 5, as one packed row
    rank 1 runs             2 3     6 7

Everything but attention works token by token, so the packed row may hold tokens of several rows of the batch.
"""

from __future__ import annotations

import inspect
import math
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from longmesh.cache.check import digest_of
from longmesh.comm.agree import agree
from longmesh.errors import LongmeshError
from longmesh.hf.cached_batch import CachedBatch
from longmesh.hf.positions import depends_on_length, give_length

if TYPE_CHECKING:
    from longmesh.hf.sharded_cache import ShardedCache


class _Signature(NamedTuple):
    shape: tuple[int, ...]
    tokens: int
    mask: int
    cached: int
    chunk: int
    generator: int


def prefill(
    batch: CachedBatch, cache: ShardedCache, model: Any, ids: Tensor, mask: Tensor | None, chunk: int
) -> None:
    """Cache the prompt `ids` (rows, tokens). Collective: every rank."""
    error = _find_problem(batch, model, ids, mask, chunk)
    group = batch.pool.group
    if group is not None:
        signature = None if error is not None else _sign(batch, ids, mask, chunk)
        agree("ShardedCache.prefill", signature, error, group, str(ids.device))
    elif error is not None:
        raise error
    batch.pool.has_agreed = True
    batch.pool.agreed.add(True)
    rows, length = ids.shape
    if not length or not rows:
        return
    mask = _whole_mask(batch, ids, mask)
    size = math.ceil(chunk / rows)
    body = body_of(model)
    if not batch.sequences:
        batch.sequences, batch.pads = [batch.pool.sequence() for _ in range(rows)], [0] * rows
    positions = _positions(batch, model, ids, mask)
    with torch.no_grad(), _longest_position(body, int(positions.max())):
        for start in range(0, length, size):
            part = ids[:, start : start + size]
            batch.finish()
            batch.see_mask(None if mask is None else mask[:, : batch.length + part.shape[1]], part.shape[1])
            if start == 0 and mask is None and batch.pool.book.window is None:
                batch.reserve([length] * rows)
            _run_chunk(batch, cache, body, part, positions[:, start : start + size])
    batch.finish()


def body_of(model: Any) -> nn.Module:
    """The model without its head."""
    found = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    return found if hasattr(found, "config") else model.base_model  # some call their head a decoder


def _longest_position(body: nn.Module, longest: int) -> ExitStack:
    """Let rotary embeddings that depend on the longest position see that of the prompt, whatever a rank runs."""
    undo = ExitStack()
    for module in body.modules():
        if depends_on_length(module):
            for handle in give_length(module, lambda: longest):
                undo.callback(handle.remove)
    return undo


def _takes_positions(module: nn.Module) -> bool:
    return "position_ids" in inspect.signature(module.forward).parameters


def _positions(batch: CachedBatch, model: Any, ids: Tensor, mask: Tensor | None) -> Tensor:
    """(rows, tokens), as generate() gives them: hidden tokens have none, unless the model numbers all by itself."""
    first, stop = batch.length, batch.length + ids.shape[1]
    if mask is None or not _takes_positions(model):
        return torch.arange(first, stop).expand(len(ids), -1)
    return (mask.long().cumsum(1) - 1).clamp(min=0)[:, first:]


def _run_chunk(
    batch: CachedBatch, cache: ShardedCache, body: nn.Module, ids: Tensor, positions: Tensor
) -> None:
    """One step with cut queries, of (rows, tokens)."""
    step = batch.begin(*ids.shape, cut=True)
    first = [ids.shape[1] - entry.num_tokens for entry in step.plan.entries]  # those before are not stored
    tokens, numbers = (torch.cat([x[row, at:] for row, at in enumerate(first)]) for x in (ids, positions))
    if not len(tokens):
        return
    rows = step.rows if len(step.rows) else torch.zeros(1, dtype=torch.int64)  # a model runs one at least
    given = tokens[rows.to(ids.device)][None], numbers[rows].to(ids.device)[None]
    try:
        body(input_ids=given[0], position_ids=given[1], past_key_values=cache, use_cache=True)
    except BaseException:
        batch.fail()
        raise


def _whole_mask(batch: CachedBatch, ids: Tensor, mask: Tensor | None) -> Tensor | None:
    """The mask of all tokens, the cached ones included."""
    if mask is None:
        return batch.extended_mask(ids.shape[1])
    if mask.shape[1] == ids.shape[1] and batch.length:
        before = batch.extended_mask(0)
        seen = torch.ones((ids.shape[0], batch.length), dtype=torch.bool) if before is None else before
        return torch.cat([seen, mask.bool().cpu()], 1)
    return mask.bool().cpu()


def _sign(batch: CachedBatch, ids: Tensor, mask: Tensor | None, chunk: int) -> _Signature:
    seen = 0 if mask is None else digest_of(mask)
    return _Signature(tuple(ids.shape), digest_of(ids), seen, batch.length, chunk, batch.pool.random_state())


def _find_problem(
    batch: CachedBatch, model: Any, ids: Tensor, mask: Tensor | None, chunk: int
) -> LongmeshError | None:
    used = getattr(model.config, "_attn_implementation", None)
    if used != "longmesh":
        return LongmeshError(
            f"ShardedCache.prefill: the model's attention is {used!r}; call hf.register() and load the model with "
            "attn_implementation='longmesh'"
        )
    body = body_of(model)
    if not _takes_positions(body):
        return LongmeshError(
            f"ShardedCache.prefill: {type(body).__name__} numbers its tokens by itself, and a rank can't run some of "
            "them only; leave prefill() out, generate() fills the cache"
        )
    if ids.ndim != 2:
        return LongmeshError(
            f"ShardedCache.prefill: input_ids of shape {tuple(ids.shape)}; give (rows, tokens)"
        )
    if chunk < 1:
        return LongmeshError(f"ShardedCache.prefill: chunk={chunk}; give 1 or more tokens")
    if batch.sequences and len(batch.sequences) != len(ids):
        return LongmeshError(
            f"ShardedCache.prefill: {len(ids)} rows of ids, and the cache holds {len(batch.sequences)}; give as many, "
            "or cache.reset() first"
        )
    if mask is not None and mask.shape not in (
        (len(ids), ids.shape[1]),
        (len(ids), ids.shape[1] + batch.length),
    ):
        return LongmeshError(
            f"ShardedCache.prefill: attention_mask {tuple(mask.shape)} and input_ids {tuple(ids.shape)}; give a mask "
            "of these tokens, or of all that are cached and these"
        )
    return None
