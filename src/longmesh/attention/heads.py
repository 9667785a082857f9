"""Sequence shards to head shards and back: the all-to-all inside a group that splits heads.

    before: all heads of my tokens        after: my heads of the group's tokens

Shapes: B batch, H and G all query and key heads, h and g mine, T my tokens, S the group's, D head dim.

Tensors are of two kinds: those with query heads (q, out) and those with key heads (k, v). A key head may be
read by several ranks: on the way back its gradients are summed.

Collective: every rank of the group calls these, with tensors of the same kinds.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from longmesh.attention.driver import Task
from longmesh.attention.rows import from_rows, width_of

Q, KV = "query heads", "key heads"


def _heads(task: Task, peer: int, kind: str) -> slice:
    share = task.route.row.rank(peer).heads
    assert share is not None, "the plan splits heads"
    return slice(share.q_start, share.q_stop) if kind == Q else slice(share.kv_start, share.kv_stop)


def _exchange(task: Task, parts: Sequence[Sequence[Tensor]], recv_counts: list[int]) -> Sequence[Tensor]:
    """Send each peer its parts, tokens outermost, and return what each peer sent, flat."""
    every = [part for of_peer in parts for part in of_peer]
    flat = every[0].new_empty(sum(part.numel() for part in every))
    for part, chunk in zip(every, flat.split([part.numel() for part in every]), strict=True):
        from_rows(chunk.view(part.shape[2], width_of(part)), part)[0].copy_(part)
    send_counts = [sum(part.numel() for part in of_peer) for of_peer in parts]
    pending = task.transfer(flat.unsqueeze(-1), send_counts, recv_counts, task.inner)
    return pending.wait().flatten().split(recv_counts)


def to_heads(task: Task, tensors_BHTD: Sequence[Tensor], kinds: Sequence[str]) -> list[Tensor]:
    """My heads of all the group's tokens, (B, h, S, D) each."""
    route, pairs = task.route, list(zip(tensors_BHTD, kinds, strict=True))
    mine = [t[:, _heads(task, route.plan.rank, kind)] for t, kind in pairs]
    widths = [width_of(t) for t in mine]
    tokens = [route.row.ownership.counts[peer] for peer in route.peers]
    parts = [[t[:, _heads(task, peer, kind)] for t, kind in pairs] for peer in route.peers]
    received = _exchange(task, parts, [n * sum(widths) for n in tokens])
    whole = [tensors_BHTD[0].new_empty((route.tokens_in_group, width)) for width in widths]
    for chunk, n, rows in zip(received, tokens, route.peer_rows, strict=True):
        pieces = chunk.split([n * width for width in widths])
        for target, piece, width in zip(whole, pieces, widths, strict=True):
            target[rows] = piece.view(n, width)
    return [from_rows(rows, like)[0] for rows, like in zip(whole, mine, strict=True)]


def to_tokens(
    task: Task, tensors_BhSD: Sequence[Tensor], kinds: Sequence[str], num_heads: Sequence[int]
) -> list[Tensor]:
    """All heads of my tokens, (B, H, T, D) each; a head that several ranks hold is summed."""
    route, tokens = task.route, task.route.plan.tokens
    parts = [[t[:, :, rows] for t in tensors_BhSD] for rows in route.peer_rows]
    slices = [[_heads(task, peer, kind) for kind in kinds] for peer in route.peers]
    sizes = [
        [
            (h.stop - h.start) * tokens * t.shape[0] * t.shape[3]
            for h, t in zip(heads, tensors_BhSD, strict=True)
        ]
        for heads in slices
    ]
    received = _exchange(task, parts, [sum(of_peer) for of_peer in sizes])
    out = [
        t.new_zeros((t.shape[0], count, tokens, t.shape[3]))
        for t, count in zip(tensors_BhSD, num_heads, strict=True)
    ]
    for chunk, of_peer, heads in zip(received, sizes, slices, strict=True):
        for target, piece, h in zip(out, chunk.split(of_peer), heads, strict=True):
            part = target[:, h]
            part += from_rows(piece.view(tokens, width_of(part)), part)[0]
    return out
