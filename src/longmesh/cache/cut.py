"""Attention of a chunk whose queries are cut: each rank has the queries of the tokens whose keys it holds.

    queries to all ranks  ->  each rank: all queries over its own keys  ->  results home, merged in rank order

Shapes: T rows of the step, H query heads, D head dim of keys, E of values.

Two exchanges of what the queries need, whatever the length of the cached part: keys stay where they are.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from longmesh.cache.decode import merge_stacked
from longmesh.cache.plan import Shares, StepPlan
from longmesh.comm import AxisGroup, collectives


def owned_rows(plan: StepPlan) -> list[np.ndarray]:
    """The rows whose tokens each rank holds, in order."""
    owners = np.empty(plan.num_rows, dtype=np.int64)
    for sequence, row, start, count in plan.entries:
        placement = sequence.placement
        numbers = np.arange(start, start + count) // placement.page
        owners[row : row + count] = np.asarray(placement.ranks)[numbers % placement.width]
    return [np.flatnonzero(owners == rank) for rank in range(plan.num_ranks)]


def gather_queries(q: Tensor, owned: list[np.ndarray], group: AxisGroup | None) -> Tensor:
    """(T, H, D) of each rank's own rows. Collective: every rank of the group."""
    if group is None or group.size == 1:
        return q
    width = q.shape[1] * q.shape[2]
    counts = [len(rows) * width for rows in owned]
    received = collectives.all_to_all(
        q.reshape(-1).repeat(group.size),
        recv_counts=counts,
        send_counts=[counts[group.rank]] * group.size,
        group=group,
    )
    order = torch.from_numpy(np.argsort(np.concatenate(owned), kind="stable")).to(q.device)
    return received.view(-1, *q.shape[1:]).index_select(0, order)


def send_home(
    mine: Tensor, shares: Shares, owned: list[np.ndarray], group: AxisGroup | None
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of this rank's own rows, of every rank's (rows, H, E + 1). Collective: every rank."""
    rank = 0 if group is None else group.rank
    seen = [shares.rows(r) for r in range(shares.plan.num_ranks)]
    if group is None or group.size == 1:
        parts = [mine]
    else:
        width = mine.shape[1] * mine.shape[2]
        places = [np.flatnonzero(np.isin(seen[rank], rows)) for rows in owned]
        sent = mine.index_select(0, torch.from_numpy(np.concatenate(places)).to(mine.device))
        counts = [int(np.isin(rows, owned[rank]).sum()) * width for rows in seen]
        received = collectives.all_to_all(
            sent.reshape(-1), recv_counts=counts, send_counts=[len(p) * width for p in places], group=group
        )
        parts = [part.view(-1, *mine.shape[1:]) for part in received.split(counts)]
    stacked = mine.new_zeros((len(parts), len(owned[rank]), *mine.shape[1:]))
    stacked[..., -1] = -torch.inf
    for source, part in enumerate(parts):
        at = np.flatnonzero(np.isin(owned[rank], seen[source]))
        stacked[source, torch.from_numpy(at).to(mine.device)] = part
    return merge_stacked(stacked[..., :-1], stacked[..., -1])
