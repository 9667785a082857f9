"""Sparse: a rank receives the keys its queries see and does not own, each once, and nothing else.

Received bytes are the least that the layout allows. One all-to-all with uneven splits per stage; a
rank's keys are dealt evenly, in order, to `stages` of them, so that the first can be computed
while the others travel. With few tokens to receive there is one.
"""

import dataclasses

import numpy as np

from longmesh.attention.exchange.base import Exchange
from longmesh.attention.exchange.fragment import AT, RANK, STAGE, START, STOP
from longmesh.attention.layout.base import Ownership


@dataclasses.dataclass(frozen=True)
class Sparse(Exchange):
    """To each rank the keys that its queries see and it does not own, each once.

    >>> window = masks.sliding_window(100)
    >>> plan = plan_attention(seq_len=4096, ranks=4, mask=window, layout="contiguous", exchange=Sparse())
    >>> [int(stats.received_tokens) for stats in plan.stats()]
    [0, 100, 100, 100]
    """

    stages_at_most: int = 2
    min_tokens: int = 1024  # a stage that would bring fewer to every rank is not worth a collective

    def stages(self, remote: np.ndarray, owned: Ownership) -> np.ndarray:
        if len(remote) == 0:
            return remote
        remote = remote[np.lexsort((remote[:, AT], remote[:, RANK]))]
        size = remote[:, STOP] - remote[:, START]
        total = np.bincount(remote[:, RANK], weights=size, minlength=owned.num_ranks).astype(np.int64)
        count = int(min(self.stages_at_most, max(1, total.max() // self.min_tokens)))
        before = np.cumsum(size) - size
        before -= (np.cumsum(total) - total)[remote[:, RANK]]
        parts: list[np.ndarray] = []
        for part in range(count):
            low = (total * part // count)[remote[:, RANK]]
            high = (total * (part + 1) // count)[remote[:, RANK]]
            start = np.clip(low - before, 0, size)
            stop = np.clip(high - before, 0, size)
            piece = remote.copy()
            piece[:, STAGE] = part + 1
            piece[:, AT] += start
            piece[:, STOP] = piece[:, START] + stop
            piece[:, START] += start
            parts.append(piece[start < stop])
        return np.concatenate(parts)
