"""The scope in which a model runs on this rank's part of a batch.

Pitfall: labels are shifted before the cut, since a token's successor may be on another rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from longmesh.attention import Exchange, TokenLayout, masks
from longmesh.attention.scope.cut_sequence import CutSequence
from longmesh.attention.scope.open_scopes import close_scope, cut_over, open_scope, plan_ahead as plan_scope
from longmesh.errors import LongmeshError
from longmesh.hf import loss, scores
from longmesh.hf.cut import CutState
from longmesh.hf.loss import SharedLoss
from longmesh.hf.mixers.bind import is_mixer
from longmesh.hf.open_batch import OpenBatch
from longmesh.hf.ranks_agree import refuse_different
from longmesh.hf.state import current
from longmesh.hf.whole_batch import WholeBatch
from longmesh.plan import Cluster


def plan_ahead(
    mesh: DeviceMesh,
    batch: Mapping[str, Any],
    *,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    mask: masks.Mask | None = None,
    layout: TokenLayout | str | None = None,
    exchange: Exchange | str | None = None,
    model: nn.Module | None = None,
    cluster: Cluster | str | None = None,
) -> None:
    """Have a batch planned, in a helper process, that `context_parallel` will be given later with the same options.
    Local. Call it with the next batch before a step: while that runs, the batch is planned as the one before it was.

    `hf.Trainer` and loaders of `hf.prepare` do this by themselves.

    >>> batch = {"input_ids": torch.arange(10)[None], "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])}
    >>> plan_ahead(mesh, batch)  # packed documents: another mask at every step
    >>> with context_parallel(mesh, batch) as part:
    ...     part["input_ids"].shape
    torch.Size([1, 5])
    """
    given = WholeBatch.of(batch, cu_seqlens)
    seen = given.visible(batch, mask)
    if seen is not None:
        how = {"layout": _layout_for(layout, model), "exchange": exchange, "cluster": cluster}
        plan_scope(mesh, given.ids.shape[1], mask=seen, **how)


def _layout_for(layout: TokenLayout | str | None, model: nn.Module | None) -> TokenLayout | str | None:
    has_mixers = layout is None and model is not None and any(map(is_mixer, model.modules()))
    return "ordered" if has_mixers else layout


@contextmanager
def context_parallel(
    mesh: DeviceMesh,
    batch: Mapping[str, Any],
    *,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    mask: masks.Mask | None = None,
    layout: TokenLayout | str | None = None,
    exchange: Exchange | str | None = None,
    unknown: str = "refuse",
    model: nn.Module | None = None,
    cluster: Cluster | str | None = None,
) -> Iterator[dict[str, Any]]:
    """Cut a batch over the ranks of the mesh and yield this rank's part, with which to call a model inside the scope.

    `batch` is whole on every rank, and the same: input_ids (rows, tokens) or inputs_embeds and, optionally, labels,
    position_ids and attention_mask (1 for tokens, 0 for padding) of the same shape; position_ids may be (3, rows,
    tokens), token_type_ids are for models that mask by them. Documents packed into a row are found in position_ids that
    start again, or given by `cu_seqlens`. Labels are those of each token, not shifted: they are shifted before the cut,
    and the loss is divided by the number of labels of the whole batch.

    With pixel_values and the like the model gets all tokens, and the sequence is cut where its language model begins.

    A model is inspected before its first step: a layer that mixes tokens in a way that can't be cut is refused by name.
    `unknown="gather"` runs such layers on the whole sequence, on every rank, and warns of the memory.

    Rows with fewer than two tokens per rank are padded on the right.

    Recurrent layers need each rank's tokens in one stretch: give the `model`, so that its batch is laid out in order
    ("ordered") if it has such layers. `cluster`: the machine that plans are made for; the mesh's own if not given.

    >>> batch = {"input_ids": torch.arange(10)[None]}  # whole, on every rank
    >>> with context_parallel(mesh, batch) as part:
    ...     part["input_ids"].shape, part["position_ids"].shape
    (torch.Size([1, 5]), torch.Size([1, 5]))
    """
    if unknown not in ("refuse", "gather"):
        raise LongmeshError(f"hf.context_parallel(unknown={unknown!r}): give 'refuse' or 'gather'")
    if current().batch is not None:
        raise LongmeshError(
            "hf.context_parallel inside another: a model would see the batch of one and the positions of the other; "
            "leave the first scope before the next, or give one batch with the rows of both"
        )
    refuse_different(
        mesh, batch if cu_seqlens is None else {**batch, "cu_seqlens": torch.as_tensor(cu_seqlens)}
    )
    has_layout, layout = layout is not None, _layout_for(layout, model)
    length = WholeBatch.of(batch, cu_seqlens).ids.shape[1]
    batch, given, cut = _cut(
        mesh, batch, cu_seqlens=cu_seqlens, mask=mask, layout=layout, exchange=exchange, cluster=cluster
    )
    whole = OpenBatch(cut, given, batch, length, has_layout)
    part = whole.part(batch)
    if batch.get("labels") is not None:
        whole.loss = SharedLoss(whole.part_of, batch["labels"], given.padding, cut.mesh)
        part |= whole.loss.part()
    mode = open_scope(cut, _HANDLERS)
    try:
        with CutState(current(), cut, whole, may_gather=unknown == "gather").opened():
            yield part
    finally:
        close_scope(mode)


# Functions of torch that a model, or a script, may call by itself.
_HANDLERS: dict[Callable[..., Any], Callable[..., Any]] = {
    **scores.HANDLERS,
    **loss.HANDLERS,
    torch.nn.functional.scaled_dot_product_attention: lambda *args, **kwargs: current().sdpa(*args, **kwargs),
    torch.nn.functional.multi_head_attention_forward: lambda *args, **kwargs: current().multihead(
        *args, **kwargs
    ),
}


def _cut(
    mesh: DeviceMesh,
    batch: Mapping[str, Any],
    *,
    cu_seqlens: Tensor | Sequence[int] | None,
    mask: masks.Mask | None,
    layout: TokenLayout | str | None,
    exchange: Exchange | str | None,
    cluster: Cluster | str | None,
) -> tuple[Mapping[str, Any], WholeBatch, CutSequence]:
    """The batch and how it is cut. A short batch is padded: a model may fail on no tokens, and take one token for a
    step of decoding, on one rank alone."""
    while True:
        given = WholeBatch.of(batch, cu_seqlens)
        length = given.ids.shape[1]
        cut = cut_over(
            mesh,
            length,
            mask=given.visible(batch, mask),
            layout=layout,
            exchange=exchange,
            cluster=cluster,
        )
        counts = cut.lead.plan.rows[0].ownership.counts
        can_pad = cu_seqlens is None and mask is None and given.can_be_padded and length < 4 * len(counts)
        if min(counts) > 1 or (min(counts) == 1 and (len(counts) == 1 or not can_pad)):
            return batch, given, cut
        if not can_pad:
            raise LongmeshError(
                f"hf.context_parallel: {length} tokens over {len(counts)} ranks leave rank {counts.index(0)} none; "
                f"pad rows to {len(counts)} tokens or more, with labels of -100 and attention_mask 0"
            )
        batch = given.padded(batch, max(2 * len(counts), 2 * length))
