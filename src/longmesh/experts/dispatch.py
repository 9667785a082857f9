"""dispatch and combine: tokens to the ranks that hold their experts, and the results back.

    route -> counts exchanged, read once -> all-to-all of tokens -> grouped by expert | experts run |
    -> all-to-all of results -> the tokens' own order -> weighted sum

Both are differentiable; the backward pass sends gradients the same ways, with the same plan. A choice that is
no expert's number is found with the counts, so every rank raises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from longmesh.comm import AxisGroup, collectives, comm_of
from longmesh.errors import LongmeshError
from longmesh.experts.plan import DispatchPlan, plan_dispatch


@dataclass(frozen=True, eq=False)
class Dispatched:
    """`rows`: the tokens for this rank's experts, those of its first expert first. `counts`: how many each has.

    >>> tokens, chosen = torch.ones(3, 4), torch.tensor([[0], [1], [1]])
    >>> sent = dispatch(tokens, chosen, mesh, num_experts=2)
    >>> sent.counts, sent.rows.shape  # of rank 0, which holds expert 0: one token of each rank
    ((2,), torch.Size([2, 4]))
    """

    rows: torch.Tensor
    counts: tuple[int, ...]
    plan: DispatchPlan
    route: Route

    @property
    def expert_ids(self) -> torch.Tensor:
        """The local number of the expert of each row."""
        counts = torch.tensor(self.counts, dtype=torch.int64, device=self.rows.device)
        return torch.arange(len(self.counts), device=self.rows.device).repeat_interleave(
            counts, output_size=len(self.rows)
        )


@dataclass(frozen=True, eq=False)
class Route:
    """What both all-to-alls need: who gets how many rows, and their orders before and after."""

    group: AxisGroup
    sent: tuple[int, ...]
    received: tuple[int, ...]
    by_owner: torch.Tensor  # of (token, choice) pairs, the order in which they are sent
    by_expert: torch.Tensor  # of received rows, the order in which experts take them
    top_k: int

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        """Rows in the order they are sent to rows grouped by expert. Collective."""
        return _exchange(pairs, self.received, self.sent, self.group)[self.by_expert]

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows grouped by expert to (token, choice) pairs in their own order. Collective."""
        arrived = torch.empty_like(rows)
        arrived[self.by_expert] = rows
        returned = _exchange(arrived, self.sent, self.received, self.group)
        pairs = torch.empty_like(returned)
        pairs[self.by_owner] = returned
        return pairs


def _exchange(
    rows: torch.Tensor, received: tuple[int, ...], sent: tuple[int, ...], group: AxisGroup
) -> torch.Tensor:
    width = rows.shape[-1]
    flat = collectives.all_to_all(
        rows.contiguous().view(-1),
        recv_counts=[n * width for n in received],
        send_counts=[n * width for n in sent],
        group=group,
    )
    return flat.view(sum(received), width)


def dispatch(x: torch.Tensor, chosen: torch.Tensor, mesh: DeviceMesh, *, num_experts: int) -> Dispatched:
    """Send the tokens `x` (tokens, features) to the experts `chosen` (tokens, choices). Collective: every rank of the
    mesh, each with tokens of its own. The mesh's axes shard the experts in order, as `Shard(0)` on each.

    >>> sent = dispatch(torch.ones(3, 4), torch.tensor([[0, 2], [1, 2], [1, 0]]), mesh, num_experts=3)
    >>> sent.counts  # of experts 0 and 1 on rank 0
    (4, 4)
    """
    if x.ndim != 2 or chosen.ndim != 2 or len(x) != len(chosen):
        raise LongmeshError(
            f"experts.dispatch: tokens of shape {tuple(x.shape)} and choices of shape {tuple(chosen.shape)}; give "
            "(tokens, features) and (tokens, choices)"
        )
    comm = comm_of(mesh)
    group = comm.group(tuple(range(mesh.ndim)))
    plan = plan_dispatch(
        _gather_counts(chosen, num_experts, group),
        mesh_sizes=comm.shape.sizes,
        row_bytes=x.shape[1] * x.element_size(),
        axes=group.axes,
        order=group.members,
    )
    route = _route(plan, chosen, group)
    rows = _ToExperts.apply(x, route)
    counts = plan.rows_of_experts(group.rank)
    return Dispatched(rows, counts, plan, route)  # pyright: ignore[reportArgumentType]


def combine(rows: torch.Tensor, weights: torch.Tensor, sent: Dispatched) -> torch.Tensor:
    """Bring back what the experts made of `sent.rows`, and add up each token's results by its `weights` (tokens,
    choices). Collective: every rank of the mesh.

    >>> sent = dispatch(torch.ones(3, 4), torch.tensor([[0, 2], [1, 2], [1, 0]]), mesh, num_experts=3)
    >>> combine(2 * sent.rows, torch.full((3, 2), 0.5), sent)[0]
    tensor([2., 2., 2., 2.])
    """
    if rows.ndim != 2 or len(rows) != len(sent.rows) or weights.shape[-1:] != (sent.route.top_k,):
        raise LongmeshError(
            f"experts.combine: results of shape {tuple(rows.shape)} and weights of shape {tuple(weights.shape)} for "
            f"{len(sent.rows)} rows and {sent.route.top_k} choices per token; give a result per row, in order, and a "
            "weight per choice"
        )
    pairs: Any = _FromExperts.apply(rows, sent.route)
    by_token = pairs.view(len(weights), sent.route.top_k, rows.shape[1])
    return (by_token * weights.unsqueeze(-1)).sum(1)


def _gather_counts(chosen: torch.Tensor, num_experts: int, group: AxisGroup) -> np.ndarray[Any, Any]:
    """How many tokens each rank has for each expert: the one host read of the layer."""
    ids = chosen.reshape(-1)
    known = (ids >= 0) & (ids < num_experts)
    place = torch.where(known, ids, num_experts)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, place, torch.ones_like(place))
    table = collectives.all_gather(counts, group=group).view(group.size, -1).cpu().numpy()
    wrong = table[:, -1]
    if wrong.any():
        rank = group.global_ranks[int(wrong.argmax())]
        raise LongmeshError(
            f"experts.dispatch: rank {rank} has {int(wrong.max())} choices that are no expert's number; they must be "
            f"0 to {num_experts - 1}"
        )
    return table[:, :-1]


def _route(plan: DispatchPlan, chosen: torch.Tensor, group: AxisGroup) -> Route:
    me, device = group.rank, chosen.device
    # Owners in the group's order, and each owner's experts in theirs: the mesh's order need not be the group's.
    sequence = np.concatenate([np.arange(start, start + length) for start, length in plan.held])
    place = torch.from_numpy(np.argsort(sequence)).to(device)
    by_owner = torch.argsort(place[chosen.reshape(-1)], stable=True)
    start, length = plan.held[me]
    arriving = torch.from_numpy(plan.counts[:, start : start + length].reshape(-1).copy()).to(device)
    expert = torch.arange(length, device=device).repeat(group.size)
    total = sum(plan.received_rows(me))
    by_expert = torch.argsort(expert.repeat_interleave(arriving, output_size=total), stable=True)
    return Route(group, plan.sent_rows(me), plan.received_rows(me), by_owner, by_expert, chosen.shape[1])


class _ToExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, route: Route) -> torch.Tensor:
        ctx.route, ctx.tokens = route, len(x)
        return route.forward(x[route.by_owner // route.top_k])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        pairs = ctx.route.back(grads[0].contiguous())
        return pairs.view(ctx.tokens, ctx.route.top_k, -1).sum(1) if ctx.tokens else grads[0][:0], None


class _FromExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, route: Route) -> torch.Tensor:
        ctx.route = route
        return route.back(rows.contiguous())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return ctx.route.forward(grads[0][ctx.route.by_owner]), None
