"""The scope in which a model runs on this rank's part of a batch.

Pitfall: labels are shifted before the cut, since a token's successor may be on another rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from longmesh.attention import Exchange, Layout, masks
from longmesh.attention.scope.open_scopes import close_scope, cut_over, open_scope
from longmesh.errors import LongmeshError
from longmesh.hf.interface import attend_directly
from longmesh.hf.loss import IGNORED, SharedLoss
from longmesh.hf.mixers.bind import is_mixer
from longmesh.hf.open_batch import OpenBatch, set_batch
from longmesh.hf.scores import HANDLERS
from longmesh.hf.token_blocks import NAMES
from longmesh.hf.visible import document_lengths, visible
from longmesh.hf.watch import watch_models


@contextmanager
def context_parallel(
    mesh: DeviceMesh,
    batch: Mapping[str, Any],
    *,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    mask: masks.Mask | None = None,
    layout: Layout | str | None = None,
    exchange: Exchange | str | None = None,
    unknown: str = "refuse",
    model: nn.Module | None = None,
) -> Iterator[dict[str, Any]]:
    """Cut a batch over the ranks of the mesh and yield this rank's, to call a model with inside the scope.

    `batch` is whole on every rank: input_ids (rows, tokens) and, if there are any, labels, position_ids and
    attention_mask (1 for tokens, 0 for padding), shaped alike; position_ids may be (3, rows, tokens), token_type_ids
    are for models that mask by them. Documents packed into a row are found in position_ids that start again, or given
    by `cu_seqlens`. Labels are those of each token, not shifted: they are shifted before the cut, and the loss is
    divided by the number of labels of the whole batch.

    A model is looked at before its first step: a layer that mixes tokens in a way that can't be cut is refused by name.
    `unknown="gather"` runs such layers on the whole sequence, on every rank, and warns of the memory.

    Recurrent layers need each rank's tokens in one stretch: give the `model`, so that its batch is laid out in order
    ("ordered") if it has such layers.

    >>> batch = {"input_ids": torch.arange(10)[None]}  # whole, on every rank
    >>> with context_parallel(mesh, batch) as part:
    ...     part["input_ids"].shape, part["position_ids"].shape
    (torch.Size([1, 5]), torch.Size([1, 5]))
    """
    if unknown not in ("refuse", "gather"):
        raise LongmeshError(f"hf.context_parallel(unknown={unknown!r}): give 'refuse' or 'gather'")
    ids: Tensor = batch["input_ids"]
    rows, seq_len = ids.shape
    given = batch.get("position_ids")
    counting = (
        given is None or given.ndim < 3
    )  # (3, rows, tokens) are of images as well: they tell no documents
    positions = torch.arange(seq_len, device=ids.device) if given is None else given
    positions = positions.expand(rows, -1) if counting else positions
    in_order = positions if counting else torch.arange(seq_len, device=ids.device).expand(rows, -1)
    seen = visible(batch, in_order, cu_seqlens)
    packed = cu_seqlens is not None or bool((in_order.diff(dim=1) != 1).any())
    if mask is not None:
        seen = mask if seen is None else seen & mask
    if layout is None and model is not None and any(map(is_mixer, model.modules())):
        layout = "ordered"
    cut = cut_over(mesh, seq_len, mask=seen, layout=layout, exchange=exchange)
    engine = cut.lead
    part = {name: value for name, value in batch.items() if name != "attention_mask"}
    part["input_ids"] = engine.shard(ids, 1)
    padding = batch.get("attention_mask")
    padding = None if padding is None or bool(padding.all()) else padding
    types = [name for name in NAMES if isinstance(batch.get(name), Tensor)]
    part |= {name: engine.shard(batch[name], 1) for name in types}
    whole = OpenBatch(
        cut,
        ids,
        positions=None if given is None else positions,
        padding=padding,
        is_packed=packed,
        types=batch[types[0]] if types else None,
        documents=lambda apart: document_lengths(padding, in_order, cu_seqlens, apart=apart),
    )
    part["position_ids"] = whole.local_positions
    handlers: dict[Callable[..., Any], Callable[..., Any]] = {
        **HANDLERS,
        torch.nn.functional.scaled_dot_product_attention: partial(attend_directly, cut),
    }
    labels = batch.get("labels")
    if labels is not None:
        following = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        loss = SharedLoss(engine, labels, following)
        part["labels"], part["shift_labels"] = loss.labels, loss.following
        part["num_items_in_batch"] = loss.num_following
        handlers[torch.nn.functional.cross_entropy] = loss
    mode, before = open_scope(cut, handlers), set_batch(whole)
    try:
        with watch_models(whole, unknown == "gather"):
            yield part
    finally:
        set_batch(before)
        close_scope(mode)
