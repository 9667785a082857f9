"""How the partial results that ranks have of a step become results: three ways, each with what it sends.

The one collective of a layer in decoding: every rank's partial results to every rank, merged in rank order.

Shapes: T rows of the step, H query heads, E head dim of values.

What a rank sends is, for each row it has keys for, the output and its log-sum-exp, fp32 (fp64 for fp64). Where all
send as much it is an all-gather; else ranks without keys send nothing and are not waited for, by an all-to-all whose
counts follow from the plan. All ranks merge the same numbers in the same order, so their results are the same bits.

Two collectives in place of one, where there is much to merge: by heads, then everything to everybody.

    rank r has partial results of all heads     rank 0   a a a a          heads of rank 0: the first half
                                                rank 1   b b b b          of rank 1: the second
    all-to-all by heads, merged in rank order   rank 0   ab ab . .
    all-gather                                  both     ab ab ab ab

Each partial result travels once, not to everybody, and what everybody gets is merged, in the model's own dtype. Heads
need not divide by the ranks. The results are the bits that one all-gather gives.

Attention of a chunk whose queries are cut: each rank has the queries of the tokens whose keys it holds.

    queries to all ranks  ->  each rank: all queries over its own keys  ->  results home, merged in rank order

Shapes: T rows of the step, H query heads, D head dim of keys, E of values.

Two exchanges of what the queries need, whatever the length of the cached part: keys stay where they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from longmesh.cache.local import merge_stacked
from longmesh.cache.plan import CacheStep, Shares, heads_of
from longmesh.comm import AxisGroup, collectives


def sent_elements(shares: Shares, rank: int, row_elements: int, num_notes: int) -> int:
    """What a rank puts on the wire in `gather_partials`."""
    others = shares.plan.num_ranks - 1
    return (shares.num_rows[rank] * row_elements + num_notes) * others


def gather_partials(
    mine: Tensor, shares: Shares, notes: Sequence[int], group: AxisGroup | None
) -> tuple[Tensor, Tensor, list[list[int]]]:
    """(T, H, E) and (T, H) of this rank's (rows, H, E + 1); and every rank's notes, a few numbers below 2 ** 63.

    Collective: every rank of the group, whatever it holds.
    """
    if group is None or group.size == 1:
        return *merge_rows([mine], shares), [list(notes)]
    flat = with_notes(mine.reshape(-1), notes)
    width = mine.shape[1] * mine.shape[2]
    extra = 0 if not notes else len(notes) * 8 // flat.element_size()
    counts = [rows * width + extra for rows in shares.num_rows]
    if len(set(counts)) == 1:
        received = collectives.all_gather(flat, group=group)
    else:
        received = collectives.all_to_all(
            flat.repeat(group.size),
            recv_counts=counts,
            send_counts=[counts[group.rank]] * group.size,
            group=group,
        )
    parts = received.split(counts)
    told = read_notes(parts, extra)
    rows = [part[: len(part) - extra].view(-1, *mine.shape[1:]) for part in parts]
    return *merge_rows(rows, shares), told


def with_notes(flat: Tensor, notes: Sequence[int]) -> Tensor:
    """A buffer with a few numbers at its end, as bits."""
    if not notes:
        return flat
    return torch.cat([flat, torch.tensor(notes, dtype=torch.int64, device=flat.device).view(flat.dtype)])


def read_notes(parts: Sequence[Tensor], extra: int) -> list[list[int]]:
    """The numbers at the end of every rank's buffer, in `extra` elements each. The host waits for its device once."""
    if not extra:
        return [[] for _ in parts]
    return torch.stack([part[len(part) - extra :] for part in parts]).view(torch.int64).tolist()


def merge_rows(rows: list[Tensor], shares: Shares) -> tuple[Tensor, Tensor]:
    """(T, H, E) and (T, H): partial results of all ranks, merged in rank order."""
    T = shares.plan.num_rows
    if len(rows) == 1 and len(rows[0]) == T:
        return rows[0][..., :-1], rows[0][..., -1]
    if all(len(part) == T for part in rows):
        stacked = torch.stack(rows)
    else:
        stacked = rows[0].new_zeros((len(rows), T, *rows[0].shape[1:]))
        stacked[..., -1] = -torch.inf
        for rank, part in enumerate(rows):
            if len(part) == T:
                stacked[rank] = part
            elif len(part):
                stacked[rank, torch.from_numpy(shares.rows(rank)).to(part.device)] = part
    return merge_stacked(stacked[..., :-1], stacked[..., -1])


def sent_bytes(
    shares: Shares, rank: int, num_heads: int, v_head_dim: int, sizes: tuple[int, int], num_notes: int
) -> int:
    """What a rank puts on the wire in both collectives."""
    heads, wide, narrow = heads_of(num_heads, shares.plan.num_ranks), *sizes
    others = shares.plan.num_ranks - 1
    first = shares.num_rows[rank] * (num_heads - heads[rank]) * (v_head_dim + 1) + num_notes * others
    return first * wide + shares.plan.num_rows * heads[rank] * v_head_dim * others * narrow


def merge_by_heads(
    mine: Tensor,
    shares: Shares,
    notes: Sequence[int],
    sinks: Tensor | None,
    dtype: torch.dtype,
    group: AxisGroup,
) -> tuple[Tensor, list[list[int]]]:
    """(T, H, E) in `dtype` of this rank's (rows, H, E + 1), and every rank's notes. Collective: every rank."""
    heads = heads_of(mine.shape[1], group.size)
    own, extra = heads[group.rank], len(notes) * 8 // mine.element_size()
    parts = [with_notes(part.reshape(-1), notes) for part in mine.split(heads, 1)]
    width = mine.shape[2]
    counts = [rows * own * width + extra for rows in shares.num_rows]
    received = collectives.all_to_all(
        torch.cat(parts), recv_counts=counts, send_counts=[len(part) for part in parts], group=group
    ).split(counts)
    told = read_notes(received, extra)
    rows = [
        part[: len(part) - extra].view(count, own, width)
        for part, count in zip(received, shares.num_rows, strict=True)
    ]
    out, lse = merge_rows(rows, shares)
    if sinks is not None:
        start = sum(heads[: group.rank])
        out = out * torch.sigmoid(lse - sinks[start : start + own].to(lse.dtype)).unsqueeze(-1)
    flat = out.to(dtype).reshape(-1)
    T, E = shares.plan.num_rows, width - 1
    sizes = [count * T * E for count in heads]
    if len(set(heads)) == 1:
        whole = collectives.all_gather(flat, group=group)
    else:
        whole = collectives.all_to_all(
            flat.repeat(group.size), recv_counts=sizes, send_counts=[len(flat)] * group.size, group=group
        )
    found = [part.view(T, count, E) for part, count in zip(whole.split(sizes), heads, strict=True)]
    return torch.cat(found, 1), told


def owned_rows(plan: CacheStep) -> list[np.ndarray]:
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
