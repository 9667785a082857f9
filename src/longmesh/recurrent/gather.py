"""Tokens of all ranks together again, and the last state on every rank, with their gradients.

What every rank holds whole is counted once: the gradient that each rank has for it is its share, as for the weights
of a model, so shares are summed on the way back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longmesh.comm.collectives import all_gather, all_reduce
from longmesh.recurrent.chain import Chain


def gather_tokens(chain: Chain, tensor: Tensor, dim: int) -> Tensor:
    """The whole tensor from every rank's stretch of `dim`. Collective; its gradient is this rank's part."""
    if chain.group is None:
        return tensor
    return _GatherSpans.apply(tensor, dim, chain)  # type: ignore[return-value]


def share_last(chain: Chain, state: Tensor) -> Tensor:
    """The state of the last rank that has tokens, on every rank. Collective; gradients are summed."""
    if chain.group is None:
        return state
    return _Share.apply(state, chain)  # type: ignore[return-value]


class _GatherSpans(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, chain: Chain) -> Tensor:
        assert chain.group is not None
        ctx.dim, ctx.span = dim, chain.plan.span(chain.rank)
        spans = [chain.plan.span(rank) for rank in range(chain.plan.num_ranks)]
        most = max(stop - start for start, stop in spans)
        rows = tensor.movedim(dim, 0)
        padded = rows.new_zeros((most, *rows.shape[1:]))
        padded[: rows.shape[0]] = rows
        parts = all_gather(padded.view(-1), group=chain.group).view(chain.group.size, *padded.shape)
        place = {rank: i for i, rank in enumerate(chain.members)}
        whole = [parts[place[rank], : stop - start] for rank, (start, stop) in enumerate(spans)]
        return torch.cat(whole).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        start, stop = ctx.span
        return gradients[0].narrow(ctx.dim, start, stop - start), None, None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, state: Tensor, chain: Chain) -> Tensor:
        assert chain.group is not None
        last = max((r for r in range(chain.plan.num_ranks) if len(range(*chain.plan.span(r)))), default=0)
        ctx.group, ctx.is_last = chain.group, chain.rank == last
        mine = state if ctx.is_last else torch.zeros_like(state)
        return all_reduce(mine.contiguous(), reduce_op="sum", group=chain.group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        total = all_reduce(gradients[0].contiguous(), reduce_op="sum", group=ctx.group)
        return total if ctx.is_last else torch.zeros_like(total), None
