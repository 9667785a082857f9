"""The one collective of a layer in decoding: every rank's partial results to every rank, merged in rank order.

Where there is much to merge, `by_heads` does it in two.

Shapes: T rows of the step, H query heads, E head dim of values.

What a rank sends is, for each row it has keys for, the output and its log-sum-exp, fp32 (fp64 for fp64). Where all
send as much it is an all-gather; else ranks without keys send nothing and are not waited for, by an all-to-all whose
counts follow from the plan. All ranks merge the same numbers in the same order, so their results are the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longmesh.cache.decode import merge_stacked
from longmesh.cache.plan import Shares
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
