"""ALiBi: a bias of scores that grows with a key's position, made for all keys and handed on as a CutBias.

Bloom and MPT make it in a method of their base model, from the number of tokens that they see. Inside a scope the
method of the instance is another: it makes the bias of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from longmesh.hf.open_batch import OpenBatch
from longmesh.hf.state import current


def give_bias(module: nn.Module, batch: OpenBatch) -> Callable[[], None]:
    """Let a module that makes an ALiBi bias make that of the whole sequence. Returns what undoes it."""
    undo = ExitStack()
    for name, for_whole in {"build_alibi_tensor": _of_mask, "build_mpt_alibi_tensor": _of_length}.items():
        if hasattr(type(module), name):
            setattr(module, name, for_whole(getattr(module, name), batch))
            undo.callback(vars(module).pop, name, None)
    if hasattr(
        type(module), "build_alibi_tensor"
    ):  # Bloom asks its method only if there is a mask of padding
        undo.callback(module.register_forward_pre_hook(_with_mask, with_kwargs=True).remove)
    return undo.close


def _with_mask(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    ids = args[0] if args else kwargs.get("input_ids")
    if kwargs.get("attention_mask") is not None or len(args) > 1:
        return None
    like = kwargs["inputs_embeds"][..., 0] if ids is None else ids
    return args, {**kwargs, "attention_mask": torch.ones(like.shape, dtype=torch.long, device=like.device)}


def _of_mask(own: Callable[..., Tensor], batch: OpenBatch) -> Callable[..., Tensor]:
    """From a mask of padding, (rows, tokens)."""

    def build(attention_mask: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        padding = torch.ones_like(batch.tokens) if batch.padding is None else batch.padding
        of_all = padding[: attention_mask.shape[0]].to(attention_mask)
        return current().bias(
            whole=lambda: own(of_all, *args, **kwargs), own=lambda: own(attention_mask, *args, **kwargs)
        )

    return build


def _of_length(own: Callable[..., Tensor], batch: OpenBatch) -> Callable[..., Tensor]:
    """From a number of tokens, of which attention takes the last ones."""

    def build(num_heads: int, sequence_length: int, *args: Any, **kwargs: Any) -> Tensor:
        return current().bias(
            whole=lambda: own(num_heads, batch.length, *args, **kwargs),
            own=lambda: own(num_heads, sequence_length, *args, **kwargs),
        )

    return build
