"""Sparse: a rank receives the keys its queries see and does not own, each once, and nothing else.

Received bytes are the least that the layout allows. One all-to-all with uneven splits per stage; a
rank's keys are dealt evenly, in order, to `stages` of them, so that the first can be computed
while the others travel. With few tokens to receive there is one.
"""

import dataclasses

import numpy as np

from longmesh.attention.exchange import needs as stretches_of
from longmesh.attention.exchange.base import Exchange
from longmesh.attention.exchange.needs import Needs, Stretches


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

    def auto_takes(self, ranks: int, num_heads: int, one_sequence: bool) -> bool:
        return True

    def last_stage(self, needs: Needs) -> int:
        most = int(needs.remote_tokens.max(initial=0))
        return min(self.stages_at_most, max(1, most // self.min_tokens)) if most else 0

    def stretches(self, needs: Needs) -> Stretches:
        return needs.dealt(max(1, self.last_stage(needs)))

    def received(self, needs: Needs, rank: int) -> np.ndarray:
        return stretches_of.received(self.stretches(needs), rank, needs.owned)

    def lent(self, needs: Needs, owner: int) -> np.ndarray:
        return stretches_of.lent(self.stretches(needs), owner, needs.owned)
