"""The load-balancing loss of a mixture of experts, from the counts of all ranks.

The loss is a product of two means over tokens: how often an expert was chosen, and how probable it was. A mean of
such products over ranks is not the product of the means. Frequencies have no gradient, so each rank takes those of
the whole sequence and multiplies them with its share of the probabilities: shares add up to the loss.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from longmesh.comm import collectives, comm_of
from longmesh.errors import LongmeshError
from longmesh.hf.open_batch import OpenBatch

_WEIGHTS = ("router_aux_loss_coef", "aux_loss_coef")  # of a model, or else of its configuration


def share_router_loss(model: nn.Module, output: Any, batch: OpenBatch) -> Any:
    """Replace a model's auxiliary loss of this rank's tokens by this rank's share of that of the whole sequence."""
    own = getattr(output, "aux_loss", None)
    if not isinstance(own, Tensor):
        return None
    config: Any = model.config.get_text_config()  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
    logits, top_k = getattr(output, "router_logits", None), getattr(config, "num_experts_per_tok", None)
    weight = weight_of(model)
    is_added = isinstance(getattr(output, "loss", None), Tensor)
    if is_added and weight is None:
        logits = None  # by which weight it was added is not known
    if isinstance(logits, tuple) and logits and isinstance(top_k, int):
        chosen, probable, rows = _sums(logits, top_k, None)
        if torch.allclose((chosen / rows * probable / rows).sum() * len(chosen), own, rtol=1e-3):
            share = _share(logits, top_k, batch)
            if is_added and weight is not None:
                output.loss = output.loss + weight * (share - own).to(output.loss.device)
            output.aux_loss = share
            return output
    raise LongmeshError(
        f"hf.context_parallel: {type(model).__name__} made an auxiliary loss from this rank's tokens in a way that is "
        "not known, so it is not a share of that of the whole sequence; set output_router_logits=False"
    )


def weight_of(model: nn.Module) -> float | None:
    """What a model multiplies its auxiliary loss by, None if that is not known."""
    config: Any = model.config.get_text_config()  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
    places = [(owner, name) for owner in (model, config) for name in _WEIGHTS]
    return next((getattr(*place) for place in places if hasattr(*place)), None)


def _sums(logits: tuple[Tensor, ...], top_k: int, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Per expert: how often it was chosen, and its probabilities, summed over tokens and layers; and the tokens."""
    experts = logits[0].shape[-1]
    chosen = probable = torch.zeros(experts, device=logits[0].device)
    rows = torch.zeros((), device=logits[0].device)
    for layer in logits:
        weights = layer.to(chosen.device).reshape(-1, experts).softmax(-1)
        real = torch.ones(len(weights), device=chosen.device) if mask is None else mask.reshape(-1).to(chosen)
        picked = torch.nn.functional.one_hot(weights.topk(top_k, dim=-1).indices, experts).sum(1)
        chosen = chosen + (picked * real[:, None]).sum(0)
        probable = probable + (weights.float() * real[:, None]).sum(0)
        rows = rows + real.sum()
    return chosen, probable, rows


def _share(logits: tuple[Tensor, ...], top_k: int, batch: OpenBatch) -> Tensor:
    cut = batch.cut
    padding = batch.padding
    if padding is None and batch.num_given < batch.length:  # a document of its own, beside packed ones
        padding = (torch.arange(batch.length, device=batch.tokens.device) < batch.num_given).expand(
            batch.rows, -1
        )
    mask = None if padding is None else cut.lead.shard(padding, 1)
    chosen, probable, rows = _sums(logits, top_k, mask)
    counts = torch.cat([chosen.detach(), rows.detach()[None]])
    if cut.mesh is not None:
        group = comm_of(cut.mesh).group(tuple(range(cut.mesh.ndim)))
        counts = collectives.all_gather(counts[None], group=group).sum(0) if group.size > 1 else counts
    total = counts[-1]
    return (counts[:-1] / total * probable / total).sum() * len(chosen)
