"""Sequence shards to head shards and back: the all-to-alls inside a group of ranks that splits heads.

    before: all heads of my tokens        after: my heads of the group's tokens

    to heads    | 0 | 1 | 2 |             one group of heads after the other: the next one is on its way, and
    compute         | 0 | 1 | 2 |         so are the results of the one before, while a group is computed
    to tokens           | 0 | 1 | 2 |

Shapes: B batch, H all heads, h mine, T my tokens, S the group's, D head dim.

Tensors are of two kinds: those with query heads (q, out), of the tokens that queries are, and those with key heads
(k, v), of the tokens that keys are. A key head may be read by several ranks: on the way back its gradients are summed.

Collective: every rank of the group calls these, with tensors of the same kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from longmesh.attention.exchange.ulysses import HeadGroup, HeadShare
from longmesh.attention.execute.driver import Task
from longmesh.attention.execute.route import Where, from_rows, width_of
from longmesh.comm.p2p import Pending

Q, KV = "query heads", "key heads"
Compute = Callable[[int, Task, list[Tensor]], Sequence[Tensor]]


def by_head_groups(
    task: Task, tensors_BHTD: Sequence[Tensor], kinds: Sequence[str], compute: Compute,
    result_kinds: Sequence[str], num_heads: Sequence[int],
) -> list[Tensor]:  # fmt: skip
    """What `compute` makes of each group of my heads, as all heads of my tokens, (B, H, T, D) each.

    `compute(number, task, tensors)` is given all the group's tokens, (B, h, S, D) each, and returns results with
    its query heads, or those of its key heads that are done.
    """
    tasks = task.by_heads()
    there, back = ToHeads(task, tensors_BHTD, kinds), ToTokens(task, result_kinds, num_heads)
    coming, leaving = there.start(0), None
    for number, part in enumerate(tasks):
        there.place(number, coming.wait())
        if number + 1 < len(tasks):
            coming = there.start(number + 1)
        results = compute(number, part, there.of(number))
        if leaving is not None:
            back.place(number - 1, leaving.wait())
        leaving = back.start(number, results)
    assert leaving is not None, "there is a group at least"
    back.place(len(tasks) - 1, leaving.wait())
    return back.whole


def to_tokens(
    task: Task, by_group: Sequence[Sequence[Tensor]], kinds: Sequence[str], num_heads: Sequence[int]
) -> list[Tensor]:
    """All heads of my tokens, (B, H, T, D) each, from what each group of heads has: (B, h, S, D)."""
    back = ToTokens(task, kinds, num_heads)
    for number, tensors in enumerate(by_group):
        back.place(number, back.start(number, tensors).wait())
    return back.whole


def _share(task: Task, rank: int) -> HeadShare:
    row = task.route.row
    assert row.shares is not None, "the plan splits heads"
    return row.shares[rank % row.inner]


def _coming(group: HeadGroup, kind: str) -> slice:
    return slice(group.q_start, group.q_stop) if kind == Q else slice(group.kv_new, group.kv_stop)


def _leaving(group: HeadGroup, kind: str) -> slice:
    return slice(group.q_start, group.q_stop) if kind == Q else slice(group.kv_start, group.kv_done)


def _tokens(task: Task, kind: str) -> list[int]:
    """How many tokens each peer has."""
    row = task.route.row
    owned = row.ownership if kind == Q else row.kv_ownership
    return [owned.counts[peer] for peer in task.route.peers]


def _rows(task: Task, kind: str) -> tuple[Where, ...]:
    """For each peer, the rows of the group's buffers that its tokens have."""
    return task.route.peer_rows if kind == Q else task.route.peer_key_rows


def _start(task: Task, parts: Sequence[Sequence[Tensor]], recv_counts: list[int]) -> Pending:
    """Start sending each peer its parts, tokens outermost."""
    every = [part for of_peer in parts for part in of_peer]
    flat = every[0].new_empty(sum(part.numel() for part in every))
    for part, chunk in zip(every, flat.split([part.numel() for part in every]), strict=True):
        from_rows(chunk.view(part.shape[2], width_of(part)), part)[0].copy_(part)
    send_counts = [sum(part.numel() for part in of_peer) for of_peer in parts]
    return task.transfer(flat.unsqueeze(-1), send_counts, recv_counts, task.inner)


def _put(target_BhSD: Tensor, rows: Where, values_BhTD: Tensor) -> None:
    if isinstance(rows, slice):
        target_BhSD[:, :, rows] = values_BhTD
    else:
        target_BhSD.index_copy_(2, rows, values_BhTD)


class ToHeads:
    """Tensors of my tokens on their way to the ranks that compute their heads, and what comes to me."""

    def __init__(self, task: Task, tensors_BHTD: Sequence[Tensor], kinds: Sequence[str]) -> None:
        self._task, self._tensors, self._kinds = task, tensors_BHTD, kinds
        self._tokens = [_tokens(task, kind) for kind in kinds]
        self._mine = _share(task, task.route.plan.rank)
        self._first = [self._mine.q_start if kind == Q else self._mine.kv_start for kind in kinds]
        self._whole = [self._buffer(t, kind) for t, kind in zip(tensors_BHTD, kinds, strict=True)]

    def _buffer(self, tensor_BHTD: Tensor, kind: str) -> Tensor:
        B, _, _, D = tensor_BHTD.shape
        mine = self._mine
        h = mine.q_stop - mine.q_start if kind == Q else mine.kv_stop - mine.kv_start
        route = self._task.route
        S = route.tokens_in_group if kind == Q else route.keys_in_group
        rows_SBhD = tensor_BHTD.new_empty((S, B, h, D))
        return rows_SBhD.permute(1, 2, 0, 3)

    def _part(self, number: int) -> list[Tensor]:
        """Of my buffers, the heads that come with a group."""
        group = self._mine.groups[number]
        slices = [_coming(group, kind) for kind in self._kinds]
        return [
            whole[:, heads.start - first : heads.stop - first]
            for whole, heads, first in zip(self._whole, slices, self._first, strict=True)
        ]

    def start(self, number: int) -> Pending:
        pairs = list(zip(self._tensors, self._kinds, strict=True))
        groups = [_share(self._task, peer).groups[number] for peer in self._task.route.peers]
        parts = [[t[:, _coming(group, kind)] for t, kind in pairs] for group in groups]
        return _start(self._task, parts, [sum(sizes) for sizes in self._sizes(number)])

    def _sizes(self, number: int) -> list[list[int]]:
        """For each peer, the elements that come from it with a group, tensor by tensor."""
        widths = [width_of(part) for part in self._part(number)]
        peers = zip(*self._tokens, strict=True)
        return [[n * width for n, width in zip(counts, widths, strict=True)] for counts in peers]

    def place(self, number: int, received: Tensor) -> None:
        targets, sizes = self._part(number), self._sizes(number)
        rows = [_rows(self._task, kind) for kind in self._kinds]
        chunks = received.flatten().split([sum(of_peer) for of_peer in sizes])
        for peer, chunk in enumerate(chunks):
            for target, piece, where, counts in zip(
                targets, chunk.split(sizes[peer]), rows, self._tokens, strict=True
            ):
                piece = piece.view(counts[peer], width_of(target))
                _put(target, where[peer], from_rows(piece, target)[0])

    def of(self, number: int) -> list[Tensor]:
        """The tensors of a group: the heads that came with it, and those before that it reads too."""
        group = self._mine.groups[number]
        bounds = {Q: (group.q_start, group.q_stop), KV: (group.kv_start, group.kv_stop)}
        return [
            whole[:, bounds[kind][0] - first : bounds[kind][1] - first]
            for whole, kind, first in zip(self._whole, self._kinds, self._first, strict=True)
        ]


class ToTokens:
    """Results of my heads on their way to the ranks that own the tokens, and what comes to me."""

    def __init__(self, task: Task, kinds: Sequence[str], num_heads: Sequence[int]) -> None:
        self._task, self._kinds, self._num_heads = task, kinds, num_heads
        self.whole: list[Tensor] = []

    def start(self, number: int, tensors_BhSD: Sequence[Tensor]) -> Pending:
        """Start sending a group's results."""
        route, mine = self._task.route, self._task.route.plan
        tokens = {Q: mine.tokens, KV: mine.kv_tokens}
        if not self.whole:
            self.whole = [
                t.new_zeros((t.shape[0], count, tokens[kind], t.shape[3]))
                for t, count, kind in zip(tensors_BhSD, self._num_heads, self._kinds, strict=True)
            ]
        rows = [_rows(self._task, kind) for kind in self._kinds]
        parts = [
            [t[:, :, where[peer]] for t, where in zip(tensors_BhSD, rows, strict=True)]
            for peer in range(len(route.peers))
        ]
        counts = [sum(t.numel() for t in self._targets(number, peer)) for peer in route.peers]
        return _start(self._task, parts, counts)

    def _targets(self, number: int, peer: int) -> list[Tensor]:
        """Where the results of a peer's group go."""
        group = _share(self._task, peer).groups[number]
        return [t[:, _leaving(group, kind)] for t, kind in zip(self.whole, self._kinds, strict=True)]

    def place(self, number: int, received: Tensor) -> None:
        """Adds what came: a key head is held by several ranks."""
        targets = [self._targets(number, peer) for peer in self._task.route.peers]
        every = [target for of_peer in targets for target in of_peer]
        pieces = received.flatten().split([target.numel() for target in every])
        for target, piece in zip(every, pieces, strict=True):
            target += from_rows(piece.view(target.shape[2], width_of(target)), target)[0]
