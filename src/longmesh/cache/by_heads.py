"""Two collectives in place of one, where there is much to merge: by heads, then everything to everybody.

    rank r has partial results of all heads     rank 0   a a a a          heads of rank 0: the first half
                                                rank 1   b b b b          of rank 1: the second
    all-to-all by heads, merged in rank order   rank 0   ab ab . .
    all-gather                                  both     ab ab ab ab

Each partial result travels once, not to everybody, and what everybody gets is merged, in the model's own dtype. Heads
need not divide by the ranks. The results are the bits that one all-gather gives.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longmesh.cache.gather import merge_rows, read_notes, with_notes
from longmesh.cache.plan import Shares
from longmesh.comm import AxisGroup, collectives
from longmesh.plan import Cluster


def heads_of(num_heads: int, num_ranks: int) -> list[int]:
    """How many heads each rank merges, the first ones first."""
    return [len(part) for part in collectives.range_split(num_heads, num_ranks)]


def is_cheaper(
    shares: Shares, num_heads: int, v_head_dim: int, sizes: tuple[int, int], cluster: Cluster
) -> bool:
    """Whether two collectives take less time than one.

    `sizes`: bytes of an element, of partial results and of results.
    """
    ranks = shares.plan.num_ranks
    if ranks == 1:
        return False
    wide, narrow = sizes
    part = (v_head_dim + 1) * wide
    rows, most = sum(shares.num_rows), max(heads_of(num_heads, ranks))
    one = (rows - min(shares.num_rows)) * num_heads * part
    first = (rows - min(shares.num_rows)) * most * part
    second = shares.plan.num_rows * (num_heads - num_heads // ranks) * v_head_dim * narrow

    def time_us(collective: str, num_bytes: int) -> float:
        return cluster.collective_us(collective, (ranks,), (0,), num_bytes)

    return time_us("all_to_all", first) + time_us("all_gather", second) < time_us("all_gather", one)


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
