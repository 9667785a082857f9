"""Sequence shards to head shards and back: the all-to-all inside a group that splits heads.

    before: all heads of my tokens        after: my heads of the group's tokens

Shapes: B batch, H and G all query and key heads, h and g mine, T my tokens, S the group's, D head dim.

Tensors are of two kinds: those with query heads (q, out) and those with key heads (k, v). A key head may be
read by several ranks: on the way back its gradients are summed.

Collective: every rank of the group calls these, with tensors of the same kinds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longmesh.attention.driver import Task
from longmesh.attention.rows import from_rows, take_rows, to_rows, width_of

Q, KV = "query heads", "key heads"


def _heads(task: Task, peer: int, kind: str) -> slice:
    share = task.route.row.rank(peer).heads
    assert share is not None, "the plan splits heads"
    return slice(share.q_start, share.q_stop) if kind == Q else slice(share.kv_start, share.kv_stop)


def _exchange(task: Task, chunks: list[Tensor], recv_counts: list[int]) -> Sequence[Tensor]:
    elements = torch.cat([chunk.flatten() for chunk in chunks]).unsqueeze(-1)
    pending = task.transfer(elements, [chunk.numel() for chunk in chunks], recv_counts, task.inner)
    return pending.wait().flatten().split(recv_counts)


def to_heads(task: Task, tensors_BHTD: Sequence[Tensor], kinds: Sequence[str]) -> list[Tensor]:
    """My heads of all the group's tokens, (B, h, S, D) each."""
    route, pairs = task.route, list(zip(tensors_BHTD, kinds, strict=True))
    chunks = [
        torch.cat([to_rows(t[:, _heads(task, peer, kind)]).flatten() for t, kind in pairs])
        for peer in route.peers
    ]
    mine = [t[:, _heads(task, route.plan.rank, kind)] for t, kind in pairs]
    widths = [width_of(t) for t in mine]
    tokens = [route.row.ownership.counts[peer] for peer in route.peers]
    received = _exchange(task, chunks, [n * sum(widths) for n in tokens])
    whole = [tensors_BHTD[0].new_empty((route.tokens_in_group, width)) for width in widths]
    for chunk, n, rows in zip(received, tokens, route.peer_rows, strict=True):
        parts = chunk.split([n * width for width in widths])
        for target, part, width in zip(whole, parts, widths, strict=True):
            target[rows] = part.view(n, width)
    return [from_rows(rows, like)[0] for rows, like in zip(whole, mine, strict=True)]


def to_tokens(
    task: Task, tensors_BhSD: Sequence[Tensor], kinds: Sequence[str], num_heads: Sequence[int]
) -> list[Tensor]:
    """All heads of my tokens, (B, H, T, D) each; a head that several ranks hold is summed."""
    route = task.route
    rows = [to_rows(t) for t in tensors_BhSD]
    chunks = [torch.cat([take_rows(r, where).flatten() for r in rows]) for where in route.peer_rows]
    tokens = route.plan.tokens
    shapes: list[list[tuple[int, int]]] = []  # for each peer and tensor: heads, width of a row
    for peer in route.peers:
        heads = [_heads(task, peer, kind) for kind in kinds]
        shapes.append(
            [
                (s.stop - s.start, (s.stop - s.start) * t.shape[0] * t.shape[3])
                for s, t in zip(heads, tensors_BhSD, strict=True)
            ]
        )
    received = _exchange(task, chunks, [tokens * sum(width for _, width in shape) for shape in shapes])
    out = [
        t.new_zeros((t.shape[0], count, tokens, t.shape[3]))
        for t, count in zip(tensors_BhSD, num_heads, strict=True)
    ]
    for peer, chunk, shape in zip(route.peers, received, shapes, strict=True):
        parts = chunk.split([tokens * width for _, width in shape])
        for target, part, (count, _), kind in zip(out, parts, shape, kinds, strict=True):
            B, _, _, D = target.shape
            target[:, _heads(task, peer, kind)] += part.view(tokens, B, count, D).permute(1, 2, 0, 3)
    return out
