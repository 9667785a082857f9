"""transformers models over a cut sequence: attn_implementation="longmesh".

    hf.register()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="longmesh")
    with hf.context_parallel(mesh, batch) as part:          # batch: input_ids, labels, position_ids, attention_mask
        loss = model(**part).loss                           # this rank's share: their sum is the mean over all
        loss.backward()                                     # and gradients add up to those of one process

Inside the scope the model sees this rank's tokens and their positions, and attention sees the whole sequence:
causal, the model's sliding window, packed documents and padding together. Outside it, "longmesh" is transformers'
own "sdpa".

Pitfall: rows of padding see padding only, so what they predict is not what one process makes of them; don't label it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from longmesh.attention import Exchange, Layout, masks
from longmesh.attention.reentrant import refuse_reentrant_checkpoint
from longmesh.attention.scope import close_scope, current_cut, cut_over, open_scope
from longmesh.errors import LongmeshError

__all__ = ["context_parallel", "register"]

NAME = "longmesh"
_IGNORED = -100


def register() -> None:
    """Make attn_implementation="longmesh" known to transformers: its attention and its masks.

    >>> from transformers import AutoModelForCausalLM, LlamaConfig
    >>> register()
    >>> config = LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    >>> model = AutoModelForCausalLM.from_config(config, attn_implementation="longmesh")
    """
    attention, mask = _interfaces()
    attention.register(NAME, attend)
    mask.register(NAME, no_mask)


def _interfaces() -> tuple[Any, Any]:
    try:
        from transformers.masking_utils import AttentionMaskInterface
        from transformers.modeling_utils import AttentionInterface
    except ImportError as error:
        raise ImportError("longmesh.hf needs transformers: pip install 'longmesh[hf]'") from error
    return AttentionInterface, AttentionMaskInterface


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: (batch, heads, tokens, head dim) in, (batch, tokens, heads, head dim) out."""
    cut = current_cut()
    if cut is None:
        return _by_sdpa(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            softcap=softcap,
            s_aux=s_aux,
            position_bias=position_bias,
            **kwargs,
        )
    if attention_mask is not None or position_bias is not None:
        raise LongmeshError(
            "a mask tensor or position bias over a cut sequence: the model would need this rank's part of it; give "
            "padding and documents to hf.context_parallel(mesh, batch), which plans attention from them"
        )
    refuse_reentrant_checkpoint()
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    engine = cut.engine(causal, window=sliding_window)
    out = engine(
        query,
        key,
        value,
        scale=scaling,
        score_mod=None if softcap is None else _capped(softcap),
        sinks=s_aux,
        dropout_p=dropout,
        dropout_seed=cut.common_seed() if dropout else None,
    )
    return out.transpose(1, 2).contiguous(), None


def _by_sdpa(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if kwargs.pop("s_aux") is not None:
        raise LongmeshError(
            "attention sinks outside hf.context_parallel: use attn_implementation='eager' there"
        )
    return sdpa_attention_forward(module, *args, **kwargs)


def _capped(limit: float) -> Callable[..., Tensor]:
    return lambda score, b, h, q_idx, kv_idx: limit * torch.tanh(score / limit)


def no_mask(
    *args: Any,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    config: Any = None,
    **kwargs: Any,
) -> Any:
    """transformers' mask function: none over a cut sequence, where the engine knows the mask; sdpa's elsewhere."""
    from transformers.masking_utils import sdpa_mask

    if current_cut() is None:
        return sdpa_mask(*args, attention_mask=attention_mask, use_vmap=use_vmap, config=config, **kwargs)
    if use_vmap:
        raise LongmeshError(
            "the model adds a mask function of its own, which sees this rank's indices; over a cut sequence give the "
            "mask to hf.context_parallel(mesh, batch, mask=...)"
        )
    if getattr(config, "attention_chunk_size", None) is not None:
        raise LongmeshError(
            "chunked attention of the model over a cut sequence is not supported; give "
            "mask=masks.chunked(n) to hf.context_parallel and unset attention_chunk_size"
        )
    if attention_mask is not None and not bool(attention_mask.all()):
        raise LongmeshError(
            "a padding mask inside hf.context_parallel: pass it in the batch given to the scope, which cuts it"
        )
    return None


@contextmanager
def context_parallel(
    mesh: DeviceMesh,
    batch: Mapping[str, Any],
    *,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    mask: masks.Mask | None = None,
    layout: Layout | str | None = None,
    exchange: Exchange | str | None = None,
) -> Iterator[dict[str, Any]]:
    """Cut a batch over the ranks of the mesh and yield this rank's, to call a model with inside the scope.

    `batch` is whole on every rank: input_ids (rows, tokens) and, if there are any, labels, position_ids and
    attention_mask (1 for tokens, 0 for padding), shaped alike. Documents packed into a row are found in position_ids
    that start again, or given by `cu_seqlens`. Labels are those of each token, not shifted: they are shifted before
    the cut, and the loss is divided by the number of labels of the whole batch.

    >>> batch = {"input_ids": torch.arange(10)[None]}  # whole, on every rank
    >>> with context_parallel(mesh, batch) as part:
    ...     part["input_ids"].shape, part["position_ids"].shape
    (torch.Size([1, 5]), torch.Size([1, 5]))
    """
    ids: Tensor = batch["input_ids"]
    rows, seq_len = ids.shape
    positions = batch.get("position_ids")
    positions = torch.arange(seq_len, device=ids.device).expand(rows, -1) if positions is None else positions
    positions = positions.expand(rows, -1)
    seen = _visible(batch, positions, cu_seqlens)
    if mask is not None:
        seen = mask if seen is None else seen & mask
    cut = cut_over(mesh, seq_len, mask=seen, layout=layout, exchange=exchange)
    engine = cut.lead
    part = {name: value for name, value in batch.items() if name != "attention_mask"}
    part["input_ids"] = engine.shard(ids, 1)
    part["position_ids"] = engine.shard(positions, 1)
    labels = batch.get("labels")
    if labels is not None:
        following = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=_IGNORED)
        part["labels"] = engine.shard(labels, 1)
        part["shift_labels"] = engine.shard(following, 1)
        part["num_items_in_batch"] = (following != _IGNORED).sum()
    mode = open_scope(cut)
    try:
        yield part
    finally:
        close_scope(mode)


def _visible(
    batch: Mapping[str, Any], positions: Tensor, cu_seqlens: Tensor | Sequence[int] | None
) -> masks.Mask | None:
    """What padding and packed documents hide, None if nothing."""
    padding = batch.get("attention_mask")
    if padding is not None and padding.ndim != 2:
        raise LongmeshError(
            f"hf.context_parallel: attention_mask is {tuple(padding.shape)}; give (rows, tokens), 1 for tokens and 0 "
            "for padding, and other masks as mask="
        )
    seen = _documents(positions, cu_seqlens) if padding is None or cu_seqlens is not None else None
    if padding is None or bool(padding.all()):
        return seen
    tokens = _without_padding(padding.bool())
    return tokens if seen is None else seen & tokens


def _documents(positions: Tensor, cu_seqlens: Tensor | Sequence[int] | None) -> masks.Mask | None:
    """The documents of each row, by their bounds or by positions that start again; None if a row is one."""
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else list(cu_seqlens)
        return masks.from_cu_seqlens(bounds, within=masks.full())
    starts = positions.diff(dim=1) != 1
    if not bool(starts.any()):
        return None
    lengths = [_runs(row.tolist()) for row in starts]
    return masks.documents(lengths[0] if len(lengths) == 1 else lengths, within=masks.full())


def _without_padding(padding: Tensor) -> masks.Mask:
    """Padding at the ends of rows is documents of its own; between tokens, hidden key by key."""
    edges = padding.diff(dim=1)
    if bool((edges.sum(1) <= 2).all()) and not bool((edges.sum(1) == 2)[padding[:, 0]].any()):
        lengths = [_runs(row.tolist()) for row in edges]
        return masks.documents(lengths[0] if len(lengths) == 1 else lengths, within=masks.full())
    return masks.mask_mod(lambda b, h, q_idx, kv_idx: padding[b, kv_idx], rows=padding.shape[0])


def _runs(starts: list[bool]) -> list[int]:
    """Lengths of the pieces of a row, from whether each token but the first begins one."""
    lengths = [1]
    for begins in starts:
        if begins:
            lengths.append(1)
        else:
            lengths[-1] += 1
    return lengths
