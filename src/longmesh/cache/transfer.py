"""Sending pages from rank to rank: what a rebalance and a change of mesh communicate.

A page is sent as its bytes, all layers of it one after another, so that nothing is rounded or reordered.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longmesh.cache.moving import Transfer
from longmesh.cache.store import PageStore
from longmesh.comm import AxisGroup, collectives


def send_pages(
    transfers: Sequence[Transfer],
    sources: Sequence[PageStore],
    targets: Sequence[PageStore],
    page_bytes: int,
    group: AxisGroup | None,
    device: torch.device | str,
) -> None:
    """Copy pages; the ranks of `transfers` are places in the group. Collective: every rank of the group.

    `sources`, `targets`: this rank's layers, old and new; `page_bytes` is a page of all of them. A rank that sends or
    receives nothing needs none.
    """
    rank = 0 if group is None else group.rank
    for transfer in transfers:
        if transfer.source == transfer.target == rank:
            for source, target in zip(sources, targets, strict=True):
                for new, old in zip(
                    target.parts(transfer.target_page), source.parts(transfer.page), strict=True
                ):
                    new.copy_(old)
    if group is None or group.size == 1:
        return
    away = [t for t in transfers if t.source != t.target]
    sent = sorted((t for t in away if t.source == rank), key=lambda t: t.target)  # stable: in the order given
    come = sorted((t for t in away if t.target == rank), key=lambda t: t.source)
    rows = [_as_bytes(part) for t in sent for store in sources for part in store.parts(t.page)]
    received = collectives.all_to_all(
        torch.cat(rows) if rows else torch.empty(0, dtype=torch.uint8, device=device),
        recv_counts=[sum(t.source == other for t in come) * page_bytes for other in range(group.size)],
        send_counts=[sum(t.target == other for t in sent) * page_bytes for other in range(group.size)],
        group=group,
    )
    at = 0
    for part in (part for t in come for store in targets for part in store.parts(t.target_page)):
        stop = at + part.numel() * part.element_size()
        part.copy_(
            received[at:stop].clone().view(part.dtype).view(part.shape)
        )  # a copy lies on a whole number
        at = stop


def _as_bytes(part: Tensor) -> Tensor:
    return part.reshape(-1).view(torch.uint8)
