"""A causal LM's loss by tiles of tokens, so that all logits of a rank never exist.

The model runs as it is, but its head sees one token; the hidden states that it was to see go to `tiled_cross_entropy`.
That one token's logits tell whether the head is all there is between hidden states and logits: a model that scales or
changes them otherwise is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from longmesh.errors import LongmeshError
from longmesh.hf.router import weight_of
from longmesh.hf.state import current
from longmesh.tiles import tiled_cross_entropy

_OF_THE_LOSS = ("labels", "shift_labels", "num_items_in_batch")


def tiled_loss(model: nn.Module, part: Mapping[str, Any], num_items: int | Tensor | None = None) -> Tensor:
    """model(**part).loss for a causal LM inside a scope, with the logits of one tile of tokens in memory.

    `part` is what `context_parallel` or `cut_batch` yields, with labels; `num_items` divides instead of its number of
    labels. The model may be wrapped, in DDP, FSDP2 or adapters.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=61, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
    ...                      intermediate_size=8, attn_implementation="longmesh")
    >>> register()
    >>> model = LlamaForCausalLM(config)
    >>> ids = torch.arange(20)[None]
    >>> with context_parallel(mesh, {"input_ids": ids, "labels": ids}) as part:
    ...     torch.allclose(tiled_loss(model, part), model(**part).loss)
    True
    """
    if "shift_labels" not in part:
        raise LongmeshError("hf.tiled_loss: the batch has no labels; give labels to hf.context_parallel")
    plain, head = _head_of(model)
    caught: list[Tensor] = []

    def show_one(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if current().is_rehearsal:
            return None
        caught.append(args[0])
        return (args[0][:, -1:], *args[1:])

    handle = head.register_forward_pre_hook(show_one)
    try:
        outputs = model(**{name: value for name, value in part.items() if name not in _OF_THE_LOSS})
    finally:
        handle.remove()
    _refuse_other_terms(plain, outputs)
    softcap = getattr(plain.config.get_text_config(), "final_logit_softcapping", None)
    hidden = caught[-1] if caught else None
    _check(plain, head, hidden, outputs.logits, softcap)
    assert hidden is not None
    loss = tiled_cross_entropy(
        hidden,
        head.weight,
        part["shift_labels"],
        bias=head.bias,
        num_items=part["num_items_in_batch"] if num_items is None else num_items,
        softcap=softcap,
    )
    routed, weight = getattr(outputs, "aux_loss", None), weight_of(plain)
    return loss if routed is None or weight is None else loss + weight * routed


def _head_of(model: nn.Module) -> tuple[Any, nn.Linear]:
    for part in model.modules():
        find = getattr(part, "get_output_embeddings", None)
        head = find() if callable(find) else None
        if isinstance(head, nn.Linear):
            return part, head
    raise LongmeshError(
        f"hf.tiled_loss: {type(model).__name__} has no head that is an nn.Linear; use the model's own loss"
    )


def _refuse_other_terms(model: Any, outputs: Any) -> None:
    """Raise for a model that would add to its loss what is not known here."""
    z_loss = getattr(model, "z_loss_coefficient", 0)
    has_router = isinstance(getattr(outputs, "aux_loss", None), Tensor)
    if z_loss or (has_router and weight_of(model) is None):
        raise LongmeshError(
            f"hf.tiled_loss: {type(model).__name__} adds to its loss a router loss or a z-loss that tiles don't know; "
            "switch it off in its configuration (output_router_logits=False, z_loss_coefficient=0)"
        )


def _check(model: Any, head: nn.Linear, hidden: Tensor | None, logits: Tensor, softcap: float | None) -> None:
    """Every rank has the same model, and so the same answer."""
    is_known = hidden is not None
    if hidden is not None and current().planned is None:
        with torch.no_grad():
            ours = torch.nn.functional.linear(hidden[:, -1:], head.weight, head.bias)
            ours = ours if softcap is None else softcap * torch.tanh(ours / softcap)
        is_known = ours.shape == logits.shape and torch.allclose(
            ours.float(), logits.float(), rtol=1e-2, atol=1e-3
        )
    if not is_known:
        raise LongmeshError(
            f"hf.tiled_loss: {type(model).__name__} does more than its head to make logits of hidden states, so its "
            "loss can't be tiled; use the model's own loss (hf.Trainer: loss='model')"
        )
